"""SFVI: Algorithm 1 of the paper, completed by the server's own term."""

import dataclasses
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from .. import _optim
from .._types import GlobalVec, Key, Scalar, Theta
from ..bounds import elbo
from ..errors import OptionError
from ..families import StructuredLocal
from ..model import SiloData, StructuredModel
from ..objectives import Shared
from . import local_params, unit_privacy
from .elbo import Drawn, Elbo, Given, Latents
from .fixed_noise import BoundFixedNoise, FixedNoise
from .importance import BoundImportanceSFVI
from .options import AbstractVariationalOptions, check_whole, falling_to_zero
from .participation import Participants
from .privacy import UnitPrivacy, released, secret_key
from .refit import refit
from .sfvi_avg import SFVIAvg, Weights
from .under_noise import under_noise


class ServerState(NamedTuple):
    r"""What is shared, the state of its optimizer, the number of the next round, and the units of each silo."""

    shared: Shared
    opt_state: optax.OptState
    round: Int[Array, ""]
    num_units: Float[Array, " silos"]


class SiloState(NamedTuple):
    r"""What never leaves the silo.

    Attributes:
        family: $\eta_{Lj}$.
        opt_state: Of its optimizer.
        center: $\mu_G$ from which `family` measures $z_G$, where that is not the one of the broadcast: under noise
            (`unit_privacy.py`). Else None.
    """

    family: StructuredLocal
    opt_state: local_params.LocalOptState
    center: GlobalVec | None = None


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
        fixed_noise: Use the same draws in every round: the bound becomes a function, which is maximized.
    """

    fast_start: FastStart | None = None
    fixed_noise: FixedNoise | None = None

    def __post_init__(self):
        AbstractVariationalOptions.__post_init__(self)
        if not isinstance(self.fast_start, FastStart | None):
            raise OptionError(f"fast_start is {self.fast_start!r}; give FastStart(rounds=5, num_local_steps=100).")
        if not isinstance(self.fixed_noise, FixedNoise | None):
            raise OptionError(f"fixed_noise is {self.fixed_noise!r}; give FixedNoise(num_samples=64).")
        if self.fixed_noise is not None:
            self._check_fixed_noise(self.fixed_noise)
        if self.participation.partial and self.bound is not None and self.bound.over == "everything":
            raise OptionError(
                "The importance-weighted bound needs the terms of all silos in every round; leave participation out, "
                "or use bounds.locally_enhanced()."
            )
        if self.privacy is not None:
            self._check_privacy()

    def _check_privacy(self):
        for name in ("fast_start", "fixed_noise"):
            if getattr(self, name) is not None:
                raise OptionError(f"privacy: {name} sends replies without noise; leave it out.")
        if self.bound is not None and self.bound.over == "everything":
            raise OptionError("privacy: use bounds.elbo() or bounds.locally_enhanced().")

    def _check_fixed_noise(self, fixed):
        for name, given, usual in (("num_samples", self.num_samples, 1), ("optimizer", self.optimizer, None)):
            if given != usual and (name == "num_samples" or fixed.quasi_newton):
                hint = "give FixedNoise its own num_samples" if name == "num_samples" else "FixedNoise climbs by L-BFGS"
                raise OptionError(f"fixed_noise: {name} has no use beside it ({hint}); leave it out.")
        if self.participation.partial:
            raise OptionError("fixed_noise needs all silos in every round; leave participation out.")
        if self.bound is not None and self.bound.over == "everything":
            raise OptionError("fixed_noise: use bounds.elbo() or bounds.locally_enhanced().")

    @property
    def usual_rounds(self) -> int:
        """Rounds that mostly suffice."""
        return 100 if self.fixed_noise is not None and self.fixed_noise.quasi_newton else 10_000

    def planned(self, num_rounds: int) -> Self:
        """The options for a run of so many rounds and no fewer: a step size that falls to zero."""
        planned = super().planned(num_rounds)
        if self.optimizer is not None or (self.fixed_noise is not None and self.fixed_noise.quasi_newton):
            return planned
        adam = optax.adam(falling_to_zero(num_rounds))
        if isinstance(planned.privacy, UnitPrivacy) and planned.privacy.noise > 0:
            own = self.local_optimizer or adam
            return dataclasses.replace(planned, optimizer=under_noise(num_rounds), local_optimizer=own)
        return dataclasses.replace(planned, optimizer=adam)

    def stages(self) -> list[tuple[AbstractVariationalOptions, int | None]]:
        """The algorithms to run one after the other, each with its rounds; None for those that the user gives."""
        fixed = self.fixed_noise
        if fixed is not None and fixed.replicates:
            half = dataclasses.replace(fixed, replicates=0, num_samples=max(2, fixed.num_samples // 2))
            once = dataclasses.replace(self, fixed_noise=dataclasses.replace(fixed, replicates=0))
            again = dataclasses.replace(once, fast_start=None, fixed_noise=half)
            return [*once.stages(), *[(again, fixed.replicate_rounds)] * fixed.replicates]
        if self.fast_start is None:
            return [(self, None)]
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(AbstractVariationalOptions)}
        start = self.fast_start
        common["refit_steps"] = 0
        if self.bound is not None and self.bound.over == "everything":
            common["bound"] = elbo()
        first = SFVIAvg(num_local_steps=start.num_local_steps, weights=start.weights, **common)
        return [(first, start.rounds), (dataclasses.replace(self, fast_start=None), None)]

    def bind(self, model: StructuredModel) -> "BoundSFVI | BoundImportanceSFVI | BoundFixedNoise":
        """Make the functions of the protocol for a model."""
        if self.bound is not None and self.bound.over == "everything":
            return BoundImportanceSFVI(Elbo(self, model))
        if self.fixed_noise is None:
            return BoundSFVI(Elbo(self, model))
        fixed = self.fixed_noise
        plain = dataclasses.replace(self, fixed_noise=None, estimator="reparameterization")
        elbo = Elbo(dataclasses.replace(plain, num_samples=fixed.num_samples), model, matched=True)
        return BoundFixedNoise(elbo, fixed.local_iterations) if fixed.quasi_newton else BoundSFVI(elbo)


class BoundSFVI(NamedTuple):
    """The functions of SFVI for one model."""

    elbo: Elbo

    @property
    def options(self) -> AbstractVariationalOptions:
        """What the user chose."""
        return self.elbo.options

    @property
    def additive(self) -> bool:
        """True if nothing couples the units of a silo and none is absent: then silos may be computed as one."""
        options = self.options
        apart = not options.participation.partial and options.privacy is None
        return apart and _optim.is_elementwise(options.own_optimizer)

    @property
    def steps_per_round(self) -> int:
        """One."""
        return 1

    @property
    def accumulates(self) -> bool:
        """True: replies are gradients, which steps add up."""
        return True

    @property
    def combines(self) -> Literal["weighted sum"]:
        """All that is needed of the gradients is their sum."""
        return "weighted sum"

    def server_init(self, key: Key, theta: Theta, num_units: Float[Array, " silos"]) -> ServerState:
        r"""Start $\eta_G$ and $\theta$."""
        return self.server_start(self.elbo.start_shared(key, theta), num_units)

    def server_start(self, shared: Shared, num_units: Float[Array, " silos"]) -> ServerState:
        """Start from given parameters."""
        return ServerState(
            shared, _optim.init(self.options.shared_optimizer, shared), jnp.zeros((), jnp.int32), num_units
        )

    def silo_init(self, key: Key, broadcast: Broadcast, data: SiloData) -> SiloState:
        r"""Start $\eta_{Lj}$ at the same point for every unit."""
        return self.silo_start(self.elbo.start_silo(key, broadcast.shared, data), broadcast, data)

    def silo_start(self, family: StructuredLocal, broadcast: Broadcast, data: SiloData) -> SiloState:
        """Start from given parameters."""
        privacy = self.options.privacy
        if isinstance(privacy, UnitPrivacy):
            center = broadcast.shared.family.center if privacy.noise > 0 else None
            return SiloState(family, unit_privacy.start(self.options, family), center)
        return SiloState(family, local_params.init(self.options.own_optimizer, family, data))

    def participants(self, key: Key, state: ServerState) -> Participants:
        """Draw who takes part in this round."""
        return self.options.participation.draw(key, state.round, state.num_units.shape[0])

    def broadcast(self, key: Key, state: ServerState) -> Broadcast:
        """Send the parameters and the key of the noise; if that is fixed, as in the first round."""
        number = jnp.zeros_like(state.round) if self.elbo.matched else state.round
        return Broadcast(state.shared, jax.random.fold_in(key, number), number)

    def silo_step(
        self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData
    ) -> tuple[SiloState, Reply, SiloInfo]:
        r"""Ascend $\mathcal{L}_j$ in $\eta_{Lj}$ and reply with its gradients in $\eta_G$, $\theta$ and $\phi$.

        One reverse pass gives all; the gradient in $\eta_G$ takes both paths, through $z_G$ and through $z_L$.
        """
        privacy = self.options.privacy
        if isinstance(privacy, UnitPrivacy):
            state = _followed(state, broadcast)
            stepped, gradient, value = unit_privacy.step(self.elbo, privacy, key, *state[:2], broadcast, data)
            return SiloState(*stepped, state.center), Reply(gradient), SiloInfo(value)
        draw = self.elbo.draw(key, broadcast.round, data, self._noise(broadcast))
        rows = local_params.select(state.family, draw.indices)
        value, (shared, local) = jax.value_and_grad(self.elbo.silo, argnums=(0, 1))(broadcast.shared, rows, draw, data)
        stepped = local_params.ascend(self.options.own_optimizer, state.family, state.opt_state, local, draw.indices)
        reply = released(privacy, secret_key(key, broadcast.round, data), Reply(shared), self.silent(broadcast))
        return SiloState(*stepped), reply, SiloInfo(value)

    def silo_steps(
        self, key: Key, states: SiloState, broadcast: Broadcast, datas: SiloData
    ) -> tuple[SiloState, Reply, SiloInfo]:
        r"""The steps of silos side by side, with $\sum_j g_j$ and $\sum_j \mathcal{L}_j$.

        Silos differentiate in $z_G$, and the sum is carried on to $\eta_G$ once.
        """
        shared, noise = broadcast.shared, self._noise(broadcast)
        drawn, pull_back = jax.vjp(partial(Drawn.of, noise=noise), shared.family)

        def step(state, data):
            draw = self.elbo.draw(key, broadcast.round, data, noise)
            rows = local_params.select(state.family, draw.indices)

            def term(drawn, theta, network, rows):
                family: Any = Given(drawn.center)
                given = Shared(family, theta, network)
                return self.elbo.silo(given, rows, draw._replace(noise=drawn.z_global), data)

            value, (*common, local) = jax.value_and_grad(term, argnums=(0, 1, 2, 3))(drawn, *shared[1:], rows)
            optimizer = self.options.own_optimizer
            stepped = local_params.ascend(optimizer, state.family, state.opt_state, local, draw.indices)
            return SiloState(*stepped), common, SiloInfo(value)

        stepped, common, info = jax.vmap(step)(states, datas)
        (in_draws, *others), info = _sum((common, info), jnp.ones_like(info.elbo_term))
        return stepped, Reply(Shared(*pull_back(in_draws), *others)), info

    def server_step(
        self, state: ServerState, broadcast: Broadcast, replies: Reply, participants: Participants
    ) -> tuple[ServerState, ServerInfo]:
        r"""Add the server's own gradient of $\mathcal{L}_0$ to the weighted sum of the replies and take one step."""
        value, own = jax.value_and_grad(self.elbo.server)(state.shared, self._noise(broadcast))
        gradient = jax.tree.map(jnp.add, own, _sum(replies.gradient, participants.weight))
        shared, opt_state = _optim.ascend(self.options.shared_optimizer, gradient, state.opt_state, state.shared)
        return ServerState(shared, opt_state, state.round + 1, state.num_units), ServerInfo(value)

    def silent(self, broadcast: Broadcast) -> Reply:
        """A gradient of zero."""
        return Reply(jax.tree.map(jnp.zeros_like, broadcast.shared))

    def silo_finish(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> StructuredLocal:
        r"""The silo's $q(z_{Lj} \mid z_G)$ under the final parameters, refitted if that was asked for."""
        steps, family = self.options.refit_steps, _followed(state, broadcast).family
        return refit(self.elbo, key, broadcast.shared, family, data, num_steps=steps)

    def latents(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> Latents:
        """The first draw of `silo_step` at the same arguments, to find out what went wrong with it."""
        draw = self.elbo.draw(key, broadcast.round, data, self._noise(broadcast))
        return self.elbo.latents(broadcast.shared, _followed(state, broadcast).family, draw, data)

    def remarks(self, trace: dict) -> list[str]:
        """Nothing to say about the rounds done."""
        del trace
        return []

    def _noise(self, broadcast):
        return self.elbo.global_noise(broadcast.key, broadcast.shared, self.options.num_samples)


def _followed(state, broadcast):
    """The silo's state where units have followed the broadcast's center, if it says from where."""
    if state.center is None:
        return state
    center = broadcast.shared.family.center
    return state._replace(family=unit_privacy.followed(state.family, center - state.center), center=center)


def _sum(tree, weights):
    """Add silos up, the first axis; as a product, for which XLA's CPU compiler has faster code than for a sum."""
    return jax.tree.map(lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, 1), tree)
