r"""SFVI on a fixed sample average: the same noise in every round makes the bound a function, which has a top.

$$\hat{\mathcal{L}}(\eta_G, \theta) = \frac1S \sum_s \mathcal{L}_0(\epsilon_G^s)
  + \sum_j \max_{\eta_{Lj}} \frac1S \sum_s \mathcal{L}_j(\epsilon_G^s, \epsilon_L^s)$$

Each silo maximizes over its own $\eta_{Lj}$, all by itself, and replies with the value and the gradient of its term
there, which by the envelope theorem is the gradient of the maximum. The server climbs by L-BFGS with backtracking.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from .._types import GlobalVec, Key, Scalar, Theta
from ..families import StructuredLocal
from ..model import SiloData
from ..objectives import Shared
from ..quasi_newton import Climb, begin, maximize
from .elbo import Draw, Elbo, Latents
from .options import AbstractVariationalOptions, check_whole
from .participation import Participants


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedNoise:
    r"""The same draws in every round, see `algorithms/fixed_noise.py`.

    The estimator is then always "reparameterization", the gradient of this very average.

    Args:
        num_samples: S, draws of $(\epsilon_G, \epsilon_L)$, at least 2.
        quasi_newton: Climb by L-BFGS at the server, and in the silos over their own parameters: tens of rounds. If
            False SFVI goes its usual way with its optimizers.
        local_iterations: L-BFGS iterations of a silo in a round at most.
        replicates: How often the maximization is repeated afterwards, from where it ended, with half as many other
            draws: `fit.noise_error` then tells how much the result owes to its draws. Silos have many parameters of
            their own, which adapt to the draws they see: the bias goes as 1/S, and so half of them doubles it.
        replicate_rounds: Rounds of each.
    """

    num_samples: int = 128
    quasi_newton: bool = True
    local_iterations: int = 30
    replicates: int = 0
    replicate_rounds: int = 20

    def __post_init__(self):
        for name, least in (("num_samples", 2), ("local_iterations", 1), ("replicates", 0), ("replicate_rounds", 1)):
            check_whole(f"FixedNoise: {name}", getattr(self, name), at_least=least)


class ServerState(NamedTuple):
    r"""The best point so far, the climb that leads on from it, the number of the next round, and units of each silo."""

    shared: Shared
    climb: Climb
    round: Int[Array, ""]
    num_units: Float[Array, " silos"]


class SiloState(NamedTuple):
    r"""$\eta_{Lj}$ at the last trial, and the $\mu_G$ from which it measures $z_G$."""

    family: StructuredLocal
    center: GlobalVec


class Broadcast(NamedTuple):
    """The point to evaluate, the best one so far, and the key of the noise, the same in all rounds."""

    trial: Shared
    shared: Shared
    key: Key


class Reply(NamedTuple):
    r"""Value and gradient of $\max_{\eta_{Lj}} \hat{\mathcal{L}}_j$ in $(\eta_G, \theta, \phi)$."""

    value: Scalar
    gradient: Shared


class SiloInfo(NamedTuple):
    """Nothing: the server reports the bound at the best point."""

    elbo_term: Scalar


class ServerInfo(NamedTuple):
    """The bound at the best point so far, and the size of its gradient, in units of the parameters."""

    elbo_term: Scalar
    gradient_size: Scalar


class BoundFixedNoise(NamedTuple):
    """The functions of quasi-Newton SFVI for one model."""

    elbo: Elbo
    iterations: int

    @property
    def options(self) -> AbstractVariationalOptions:
        """What the user chose."""
        return self.elbo.options

    @property
    def additive(self) -> bool:
        """False: L-BFGS looks at all parameters of a silo together."""
        return False

    @property
    def steps_per_round(self) -> int:
        """At most so many in a silo."""
        return self.iterations

    @property
    def accumulates(self) -> bool:
        """False: L-BFGS needs every gradient as it is."""
        return False

    @property
    def combines(self) -> Literal["sum"]:
        """All that is needed of values and gradients is their sum."""
        return "sum"

    def server_init(self, key: Key, theta: Theta, num_units: Float[Array, " silos"]) -> ServerState:
        r"""Start $\eta_G$ and $\theta$."""
        return self.server_start(self.elbo.start_shared(key, theta), num_units)

    def server_start(self, shared: Shared, num_units: Float[Array, " silos"]) -> ServerState:
        """Start from given parameters."""
        return ServerState(shared, begin(_flat(shared)), jnp.zeros((), jnp.int32), num_units)

    def silo_init(self, key: Key, broadcast: Broadcast, data: SiloData) -> SiloState:
        r"""Start $\eta_{Lj}$ at the same point for every unit."""
        return self.silo_start(self.elbo.start_silo(key, broadcast.shared, data), broadcast, data)

    def silo_start(self, family: StructuredLocal, broadcast: Broadcast, data: SiloData) -> SiloState:
        """Start from given parameters."""
        del data
        return SiloState(family, broadcast.shared.family.center)

    def participants(self, key: Key, state: ServerState) -> Participants:
        """All."""
        return self.options.participation.draw(key, state.round, state.num_units.shape[0])

    def broadcast(self, key: Key, state: ServerState) -> Broadcast:
        """Send the next trial."""
        return Broadcast(_unflatten(state.climb.trial, state.shared), state.shared, key)

    def silo_step(
        self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData
    ) -> tuple[SiloState, Reply, SiloInfo]:
        r"""Maximize over $\eta_{Lj}$ at the trial; reply with value and gradient there."""
        draw = self._draw(key, broadcast, data)
        family = self._maximize(state, broadcast.trial, draw, data)
        value, gradient = jax.value_and_grad(self.elbo.silo)(broadcast.trial, family, draw, data)
        center = broadcast.trial.family.center
        return SiloState(family, center), Reply(value, gradient), SiloInfo(jnp.zeros((), value.dtype))

    def server_step(
        self, state: ServerState, broadcast: Broadcast, replies: Reply, participants: Participants
    ) -> tuple[ServerState, ServerInfo]:
        """Tell the climb about its trial."""
        del participants  # all of them
        own, own_gradient = jax.value_and_grad(self.elbo.server)(broadcast.trial, self._noise(broadcast))
        value = own + jnp.sum(replies.value)
        gradient = _flat(own_gradient) + _flat(jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), replies.gradient))
        climb = state.climb.told(value, gradient)
        following = ServerState(_unflatten(climb.best, state.shared), climb, state.round + 1, state.num_units)
        return following, ServerInfo(climb.value, jnp.sqrt(jnp.mean(climb.gradient**2)))

    def silent(self, broadcast: Broadcast) -> Reply:
        """A value and a gradient of zero."""
        return Reply(
            jnp.zeros((), broadcast.shared.family.center.dtype), jax.tree.map(jnp.zeros_like, broadcast.shared)
        )

    def silo_finish(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> StructuredLocal:
        r"""The silo's $q(z_{Lj} \mid z_G)$ at the best point."""
        return self._maximize(state, broadcast.shared, self._draw(key, broadcast, data), data)

    def latents(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> Latents:
        """The first draw at the trial, to find out what went wrong with it."""
        family = state.family.recentered(broadcast.trial.family.center - state.center)
        return self.elbo.latents(broadcast.trial, family, self._draw(key, broadcast, data), data)

    def remarks(self, trace: dict) -> list[str]:
        """Nothing to say about the rounds done."""
        del trace
        return []

    def _maximize(self, state, shared, draw, data):
        start = state.family.recentered(shared.family.center - state.center)

        def objective(family):
            return self.elbo.silo(shared, family, draw, data)

        return maximize(objective, start, iterations=self.iterations)

    def _draw(self, key, broadcast, data) -> Draw:
        return self.elbo.draw(key, jnp.zeros((), jnp.int32), data, self._noise(broadcast))

    def _noise(self, broadcast):
        return self.elbo.global_noise(broadcast.key, broadcast.shared, self.options.num_samples)


def _flat(shared):
    return ravel_pytree(shared)[0]


def _unflatten(point, like):
    return ravel_pytree(like)[1](point)
