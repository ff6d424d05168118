"""SFVI: Algorithm 1 of the paper, completed by the server's own term."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from .. import _optim
from .._types import Key, Scalar, Theta
from ..errors import OptionError
from ..families import StructuredLocal
from ..model import SiloData, StructuredModel
from ..objectives import Shared
from . import local_params
from .elbo import Elbo, Latents
from .options import AbstractVariationalOptions, check_whole
from .participation import Participants
from .refit import refit
from .sfvi_avg import SFVIAvg, Weights


class ServerState(NamedTuple):
    r"""What is shared, the state of its optimizer, the number of the next round, and the units of each silo."""

    shared: Shared
    opt_state: optax.OptState
    round: Int[Array, ""]
    num_units: Float[Array, " silos"]


class SiloState(NamedTuple):
    r"""$\eta_{Lj}$ and the state of its optimizer. It never leaves the silo."""

    family: StructuredLocal
    opt_state: local_params.LocalOptState


class Broadcast(NamedTuple):
    r"""All that the server sends: what is shared, and the key from which every silo makes the same $\epsilon_G$."""

    shared: Shared
    key: Key
    round: Int[Array, ""]


class Reply(NamedTuple):
    r"""All that a silo sends: $g_j = \partial \mathcal{L}_j / \partial (\eta_G, \theta, \phi)$."""

    gradient: Shared


class SiloInfo(NamedTuple):
    r"""The silo's estimate of $\mathcal{L}_j$; stays in the silo."""

    elbo_term: Scalar


class ServerInfo(NamedTuple):
    r"""The server's estimate of $\mathcal{L}_0$."""

    elbo_term: Scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastStart:
    """Rounds of SFVI-Avg before the first of SFVI, which they save many of.

    Args:
        rounds: Rounds of SFVI-Avg.
        num_local_steps: Steps of each silo in such a round.
        weights: How silos are weighted when they are averaged, see `SFVIAvg`.
    """

    rounds: int = 5
    num_local_steps: int = 100
    weights: Weights = "uniform"

    def __post_init__(self):
        check_whole("FastStart: rounds", self.rounds, at_least=1)
        SFVIAvg(num_local_steps=self.num_local_steps, weights=self.weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFVI(AbstractVariationalOptions):
    r"""Structured federated variational inference: the trajectory of pooled data, one exchange a step.

    With the same noise, any split of the units over silos gives the same $\eta_G$, $\theta$ and local
    parameters, provided that the optimizers work elementwise (no clipping by a global norm) and all silos take part.

    Args:
        optimizer: See `algorithms.options.AbstractVariationalOptions` for this and all options not listed here.
        fast_start: Begin with a few rounds of SFVI-Avg, under the same options.
    """

    fast_start: FastStart | None = None

    def __post_init__(self):
        AbstractVariationalOptions.__post_init__(self)
        if not isinstance(self.fast_start, FastStart | None):
            raise OptionError(f"fast_start is {self.fast_start!r}; give FastStart(rounds=5, num_local_steps=100).")

    def stages(self) -> list[tuple[AbstractVariationalOptions, int | None]]:
        """The algorithms to run one after the other, each with its rounds; None for those that the user gives."""
        if self.fast_start is None:
            return [(self, None)]
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(AbstractVariationalOptions)}
        start = self.fast_start
        common["refit_steps"] = 0
        first = SFVIAvg(num_local_steps=start.num_local_steps, weights=start.weights, **common)
        return [(first, start.rounds), (dataclasses.replace(self, fast_start=None), None)]

    def bind(self, model: StructuredModel) -> "BoundSFVI":
        """Make the functions of the protocol for a model."""
        return BoundSFVI(Elbo(self, model))


class BoundSFVI(NamedTuple):
    """The functions of SFVI for one model."""

    elbo: Elbo

    @property
    def options(self) -> AbstractVariationalOptions:
        """What the user chose."""
        return self.elbo.options

    @property
    def additive(self) -> bool:
        """True if no optimizer couples the units of a silo and none is absent: then silos may be computed as one."""
        return _optim.is_elementwise(self.options.own_optimizer) and not self.options.participation.partial

    @property
    def steps_per_round(self) -> int:
        """One."""
        return 1

    def server_init(self, key: Key, theta: Theta, num_units: Float[Array, " silos"]) -> ServerState:
        r"""Start $\eta_G$ and $\theta$."""
        return self.server_start(self.elbo.start_shared(key, theta), num_units)

    def server_start(self, shared: Shared, num_units: Float[Array, " silos"]) -> ServerState:
        """Start from given parameters."""
        return ServerState(shared, _optim.init(self.options.optimizer, shared), jnp.zeros((), jnp.int32), num_units)

    def silo_init(self, key: Key, broadcast: Broadcast, data: SiloData) -> SiloState:
        r"""Start $\eta_{Lj}$ at the same point for every unit."""
        del key
        return self.silo_start(self.elbo.start_local(data), broadcast, data)

    def silo_start(self, family: StructuredLocal, broadcast: Broadcast, data: SiloData) -> SiloState:
        """Start from given parameters."""
        del broadcast
        return SiloState(family, local_params.init(self.options.own_optimizer, family, data))

    def participants(self, key: Key, state: ServerState) -> Participants:
        """Draw who takes part in this round."""
        return self.options.participation.draw(key, state.round, state.num_units.shape[0])

    def broadcast(self, key: Key, state: ServerState) -> Broadcast:
        """Send the parameters and the key of the noise."""
        return Broadcast(state.shared, jax.random.fold_in(key, state.round), state.round)

    def silo_step(
        self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData
    ) -> tuple[SiloState, Reply, SiloInfo]:
        r"""Ascend $\mathcal{L}_j$ in $\eta_{Lj}$ and reply with its gradients in $\eta_G$, $\theta$ and $\phi$.

        One reverse pass gives all; the gradient in $\eta_G$ takes both paths, through $z_G$ and through $z_L$.
        """
        draw = self.elbo.draw(key, broadcast.round, data, self._noise(broadcast))
        rows = local_params.select(state.family, draw.indices)
        value, (shared, local) = jax.value_and_grad(self.elbo.silo, argnums=(0, 1))(broadcast.shared, rows, draw, data)
        stepped = local_params.ascend(self.options.own_optimizer, state.family, state.opt_state, local, draw.indices)
        return SiloState(*stepped), Reply(shared), SiloInfo(value)

    def server_step(
        self, state: ServerState, broadcast: Broadcast, replies: Reply, participants: Participants
    ) -> tuple[ServerState, ServerInfo]:
        r"""Add the server's own gradient of $\mathcal{L}_0$ to the weighted sum of the replies and take one step."""
        value, own = jax.value_and_grad(self.elbo.server)(state.shared, self._noise(broadcast))

        def add(mine, theirs):
            return mine + jnp.tensordot(participants.weight.astype(theirs.dtype), theirs, 1)

        gradient = jax.tree.map(add, own, replies.gradient)
        shared, opt_state = _optim.ascend(self.options.optimizer, gradient, state.opt_state, state.shared)
        return ServerState(shared, opt_state, state.round + 1, state.num_units), ServerInfo(value)

    def silo_finish(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> StructuredLocal:
        r"""The silo's $q(z_{Lj} \mid z_G)$ under the final parameters, refitted if that was asked for."""
        steps = self.options.refit_steps
        return refit(self.elbo, key, broadcast.shared, state.family, data, num_steps=steps)

    def latents(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> Latents:
        """The first draw of `silo_step` at the same arguments, to find out what went wrong with it."""
        draw = self.elbo.draw(key, broadcast.round, data, self._noise(broadcast))
        return self.elbo.latents(broadcast.shared, state.family, draw, data)

    def remarks(self, trace: dict) -> list[str]:
        """Nothing to say about the rounds done."""
        del trace
        return []

    def _noise(self, broadcast):
        return self.elbo.global_noise(broadcast.key, broadcast.shared, self.options.num_samples)
