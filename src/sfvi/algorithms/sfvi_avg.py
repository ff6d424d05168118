"""SFVI-Avg: Algorithm 2 of the paper, many local steps between two exchanges."""

import dataclasses
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from .. import _optim
from .._types import GlobalVec, Key, Scalar, Theta
from ..barycenter import barycenter
from ..errors import OptionError
from ..families import StructuredLocal
from ..model import SiloData, StructuredModel
from ..objectives import Shared
from . import ascent, local_params
from .elbo import Draw, Elbo, Latents
from .options import AbstractVariationalOptions, check_whole, refuse_importance_weighted
from .participation import Participants
from .privacy import UnitPrivacy, released, secret_key
from .refit import refit

Weights = Literal["uniform", "units"]
MAX_RESIDUAL = 1e-8


class ServerState(NamedTuple):
    """What is shared, the number of the next round, and the units of each silo."""

    shared: Shared
    round: Int[Array, ""]
    num_units: Float[Array, " silos"]


class SiloState(NamedTuple):
    r"""What a silo keeps between rounds; it never leaves.

    Attributes:
        family: $\eta_{Lj}$.
        opt_state: State of its optimizer.
        shared_opt_state: State of the optimizer of the silo's copy of what is shared.
        center: $\mu_G^{(j)}$ of that copy, from which `family` measures $z_G$.
    """

    family: StructuredLocal
    opt_state: local_params.LocalOptState
    shared_opt_state: optax.OptState
    center: GlobalVec


class Broadcast(NamedTuple):
    r"""All that the server sends: what is shared, the total N of units, and a key to estimate the ELBO with."""

    shared: Shared
    total_units: Scalar
    key: Key
    round: Int[Array, ""]


class Reply(NamedTuple):
    r"""All that a silo sends: its copy of $\eta_G$, $\theta$ and $\phi$ after its steps."""

    shared: Shared


class SiloInfo(NamedTuple):
    r"""The silo's estimate of $\mathcal{L}_j$ before its steps; stays in the silo."""

    elbo_term: Scalar


class ServerInfo(NamedTuple):
    r"""The server's estimate of $\mathcal{L}_0$ before the round, and how exactly the barycenter was found."""

    elbo_term: Scalar
    barycenter_residual: Scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFVIAvg(AbstractVariationalOptions):
    r"""SFVI-Avg: each silo takes m steps by itself, then the server averages.

    Silo j ascends $\mathcal{L}_0 + (N / N_j) \mathcal{L}_j$ from the broadcast, as if the other silos held copies of
    its own units. All of $\mathcal{L}_j$ is scaled, $-\log q(z_L \mid z_G)$ included. The server takes the
    2-Wasserstein barycenter of the silos' $q(z_G)$ and the means of their $\theta$ (in unconstrained space) and
    $\phi$. Local means follow the average so that $q(z_L \mid z_G)$ does not jump.

    It assumes that units are exchangeable between silos. Where silos are small or differ a lot, averaging is
    biased: SFVI is not. This is at its worst for latents of the silo as a whole (a hospital's intercept): a copy of one
    silo's data tells nothing of the spread between silos. There `num_units` is 1 unless given, so both weights agree.

    Args:
        num_local_steps: m, steps of a silo in one round.
        weights: Of the silos in the average: "uniform", or "units" for $N_j / N$. With partial participation
            they are divided by the inclusion probabilities and normalized.
        refit_steps: Steps of each unit in the local refit after the last round; 0 for none. With minibatches the
            refit takes N / batch times as many, so that every unit gets its own.
        optimizer: See `algorithms.options.AbstractVariationalOptions` for this and all options not listed here. Every
            silo has its own state of it, which it keeps between rounds.
    """

    num_local_steps: int
    weights: Weights = "uniform"
    refit_steps: int = 500

    def __post_init__(self):
        AbstractVariationalOptions.__post_init__(self)
        refuse_importance_weighted("SFVIAvg", self.bound)
        if isinstance(self.privacy, UnitPrivacy):
            raise OptionError("SFVIAvg: units are protected under SFVI only; use it, or SiloPrivacy.")
        check_whole("num_local_steps", self.num_local_steps, at_least=1)
        if self.weights not in get_args(Weights):
            raise OptionError(f"weights is {self.weights!r}; choose 'uniform' or 'units'.")

    @property
    def usual_rounds(self) -> int:
        """Rounds that mostly suffice."""
        return 100

    def stages(self) -> list[tuple[AbstractVariationalOptions, int | None]]:
        """Itself only, for as many rounds as the user gives."""
        return [(self, None)]

    def bind(self, model: StructuredModel) -> "BoundSFVIAvg":
        """Make the functions of the protocol for a model."""
        return BoundSFVIAvg(Elbo(self, model), self.num_local_steps, self.weights)


class BoundSFVIAvg(NamedTuple):
    """The functions of SFVI-Avg for one model."""

    elbo: Elbo
    steps_per_round: int
    weights: Weights

    @property
    def options(self) -> AbstractVariationalOptions:
        """What the user chose."""
        return self.elbo.options

    @property
    def additive(self) -> bool:
        """False: every silo has a copy of its own of what is shared."""
        return False

    @property
    def accumulates(self) -> bool:
        """True: replies are moves from the broadcast, which averages add up."""
        return True

    @property
    def combines(self) -> Literal["mean"]:
        """Of mean fields the barycenter is the mean of means and standard deviations; of others more is needed."""
        return "mean"

    def server_init(self, key: Key, theta: Theta, num_units: Float[Array, " silos"]) -> ServerState:
        r"""Start $\eta_G$ and $\theta$."""
        return self.server_start(self.elbo.start_shared(key, theta), num_units)

    def server_start(self, shared: Shared, num_units: Float[Array, " silos"]) -> ServerState:
        """Start from given parameters, whose family must have a barycenter."""
        if not np.all(np.asarray(num_units) > 0):
            raise OptionError(
                "SFVI-Avg needs the number of exchangeable units of each silo, and at least one silo's program has no "
                "plate, or several, that could count them; give num_units={silo: number}."
            )
        jax.eval_shape(barycenter, jax.tree.map(lambda leaf: leaf[None], shared.family), jnp.ones(1))
        return ServerState(shared, jnp.zeros((), jnp.int32), num_units)

    def silo_init(self, key: Key, broadcast: Broadcast, data: SiloData) -> SiloState:
        r"""Start $\eta_{Lj}$ at the same point for every unit."""
        return self.silo_start(self.elbo.start_silo(key, broadcast.shared, data), broadcast, data)

    def silo_start(self, family: StructuredLocal, broadcast: Broadcast, data: SiloData) -> SiloState:
        """Start from given parameters, measured from the center of the broadcast."""
        return SiloState(
            family,
            local_params.init(self.options.own_optimizer, family, data),
            _optim.init(self.options.shared_optimizer, broadcast.shared),
            broadcast.shared.family.center,
        )

    def participants(self, key: Key, state: ServerState) -> Participants:
        """Draw who takes part in this round."""
        return self.options.participation.draw(key, state.round, state.num_units.shape[0])

    def broadcast(self, key: Key, state: ServerState) -> Broadcast:
        """Send the parameters, N and a key."""
        return Broadcast(state.shared, state.num_units.sum(), jax.random.fold_in(key, state.round), state.round)

    def silo_step(
        self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData
    ) -> tuple[SiloState, Reply, SiloInfo]:
        r"""Take m steps on $\mathcal{L}_0 + (N / N_j) \mathcal{L}_j$ from the broadcast."""
        start = self._start(state, broadcast)
        elbo_term = ascent.estimate(self.elbo, key, broadcast, start[0].family, data, self.steps_per_round)

        def step(carry, number):
            return self._step(key, carry, number, broadcast, data)[0], None

        numbers = broadcast.round * self.steps_per_round + jnp.arange(self.steps_per_round)
        (state, shared), _ = jax.lax.scan(step, start, numbers)
        secret = secret_key(key, broadcast.round, data)
        reply = released(self.options.privacy, secret, Reply(shared), self.silent(broadcast))
        return state._replace(center=shared.family.center), reply, SiloInfo(elbo_term)

    def server_step(
        self, state: ServerState, broadcast: Broadcast, replies: Reply, participants: Participants
    ) -> tuple[ServerState, ServerInfo]:
        r"""Average: barycenter of the families, means of $\theta$ and $\phi$. If nobody took part all stays."""
        noise = self.elbo.global_noise(broadcast.key, state.shared, ascent.num_evaluations(self.steps_per_round))
        value = self.elbo.server(state.shared, noise)
        weights = participants.weight
        if self.weights == "units":
            weights = weights * state.num_units[participants.index].astype(weights.dtype)
        nobody = jnp.sum(weights) == 0
        weights = jnp.where(nobody, 1.0, weights)
        found = barycenter(replies.shared.family, weights)

        def mean(leaves):
            return jnp.tensordot((weights / jnp.sum(weights)).astype(leaves.dtype), leaves, 1)

        means = jax.tree.map(mean, (replies.shared.theta, replies.shared.network))
        averaged = Shared(found.family, *means)
        shared = jax.tree.map(lambda old, new: jnp.where(nobody, old, new), state.shared, averaged)
        info = ServerInfo(value, jnp.where(nobody, 0.0, found.residual))
        return ServerState(shared, state.round + 1, state.num_units), info

    def silent(self, broadcast: Broadcast) -> Reply:
        """A copy that did not move."""
        return Reply(broadcast.shared)

    def silo_finish(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> StructuredLocal:
        r"""The silo's $q(z_{Lj} \mid z_G)$ under the final average, refitted to it."""
        (state, shared) = self._start(state, broadcast)
        return refit(self.elbo, key, shared, state.family, data, num_steps=self.options.refit_steps)

    def latents(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> Latents:
        """The draw of the first local step that is not finite, or else of the last one."""

        def step(carry, number):
            return self._step(key, carry, number, broadcast, data)

        first, start = broadcast.round * self.steps_per_round, self._start(state, broadcast)
        number, (silo, shared) = ascent.before_break(step, start, first, self.steps_per_round)
        return self.elbo.latents(shared, silo.family, ascent.own_draw(self.elbo, key, shared, number, data), data)

    def remarks(self, trace: dict) -> list[str]:
        """Say so if a barycenter was not found to the promised accuracy."""
        residual = np.asarray(trace["barycenter_residual"])
        if not np.any(residual > MAX_RESIDUAL):
            return []
        worst = int(np.argmax(residual))
        return [
            f"The barycenter of round {worst} was found only to {residual[worst]:.1g}: global posteriors of silos are "
            "nearly singular; rescale the model, or use families.mean_field()."
        ]

    def _start(self, state, broadcast):
        """The silo's state and its copy of what is shared before the first step: $q(z_L | z_G)$ as it was."""
        shift = broadcast.shared.family.center - state.center
        return state._replace(family=state.family.recentered(shift)), broadcast.shared

    def _step(self, key, current, number, broadcast, data):
        state, shared = current
        draw = ascent.own_draw(self.elbo, key, shared, number, data)
        scale = (broadcast.total_units / data.num_units).astype(draw.noise.dtype)

        def objective(shared, rows):
            return scaled_objective(self.elbo, shared, rows, draw, data, scale)

        rows = local_params.select(state.family, draw.indices)
        value, (gradient, local) = jax.value_and_grad(objective, argnums=(0, 1))(shared, rows)
        shared, shared_state = _optim.ascend(self.options.shared_optimizer, gradient, state.shared_opt_state, shared)
        family, opt_state = local_params.ascend(
            self.options.own_optimizer, state.family, state.opt_state, local, draw.indices
        )
        return (SiloState(family, opt_state, shared_state, state.center), shared), value


def scaled_objective(
    elbo: Elbo, shared: Shared, rows: StructuredLocal, draw: Draw, data: SiloData, scale: Scalar
) -> Scalar:
    r"""Estimate $\mathcal{L}_0 + (N / N_j) \mathcal{L}_j$.

    All of $\mathcal{L}_j$ is scaled: the factor stands for copies of the silo, each with latents and an entropy of its
    own. Were only the log joint scaled, the objective would be unbounded and variance components collapse.
    """
    return elbo.server(shared, draw.noise) + scale * elbo.silo(shared, rows, draw, data)
