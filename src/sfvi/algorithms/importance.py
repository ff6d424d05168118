r"""SFVI on the importance-weighted bound over everything (Burda et al. 2016).

$$\mathrm{E} \log \frac1K \sum_{k=1}^K w_k, \qquad \log w_k = \mathcal{L}_0^k + \sum_j \mathcal{L}_j^k$$

A weight needs the terms of all silos, so a silo replies with its K values and K gradients, from which the server makes
$v_k = w_k / \sum_l w_l$ and the doubly reparameterized gradient: $\sum_k v_k^2\, \partial \mathcal{L}^k$ for what $q$
is made of, $\sum_k v_k\, \partial \mathcal{L}^k$ for $\theta$ (Tucker et al. 2018). The next broadcast brings $v$ to
the silos, which only then take the step in $\eta_{Lj}$ that belongs to it: the trajectory is that of pooled data.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from .. import _optim
from .._types import Key, Scalar, Theta
from ..families import StructuredLocal
from ..model import SiloData
from ..objectives import Shared
from . import local_params
from .elbo import Elbo, Latents
from .options import AbstractVariationalOptions
from .participation import Participants
from .refit import refit

Weights = Float[Array, "samples draws"]


class ServerState(NamedTuple):
    """As for SFVI, and the weights $v$ of the last round."""

    shared: Shared
    opt_state: optax.OptState
    weights: Weights
    round: Int[Array, ""]
    num_units: Float[Array, " silos"]


class SiloState(NamedTuple):
    r"""$\eta_{Lj}$, the state of its optimizer, and the K gradients that wait for their weights."""

    family: StructuredLocal
    opt_state: local_params.LocalOptState
    pending: StructuredLocal


class Broadcast(NamedTuple):
    r"""What is shared, the key of $\epsilon_G$, and the weights $v$ of the round before."""

    shared: Shared
    weights: Weights
    key: Key
    round: Int[Array, ""]


class Reply(NamedTuple):
    r"""K values of $\mathcal{L}_j$ and K gradients in $(\eta_G, \theta, \phi)$."""

    values: Weights
    gradients: Shared


class SiloInfo(NamedTuple):
    """Nothing: the bound is no sum over silos; the server reports it."""

    elbo_term: Scalar


class ServerInfo(NamedTuple):
    """The estimate of the bound."""

    elbo_term: Scalar


class BoundImportanceSFVI(NamedTuple):
    """The functions of SFVI on this bound, for one model."""

    elbo: Elbo

    @property
    def options(self) -> AbstractVariationalOptions:
        """What the user chose."""
        return self.elbo.options

    @property
    def additive(self) -> bool:
        """True if no optimizer couples the units of a silo: values and gradients are summed over silos."""
        return _optim.is_elementwise(self.options.own_optimizer)

    @property
    def steps_per_round(self) -> int:
        """One."""
        return 1

    @property
    def accumulates(self) -> bool:
        """False: draws are weighed by the values of their own round."""
        return False

    @property
    def combines(self) -> None:
        """None: each silo's term weighs the others'."""
        return

    def server_init(self, key: Key, theta: Theta, num_units: Float[Array, " silos"]) -> ServerState:
        r"""Start $\eta_G$ and $\theta$."""
        return self.server_start(self.elbo.start_shared(key, theta), num_units)

    def server_start(self, shared: Shared, num_units: Float[Array, " silos"]) -> ServerState:
        """Start from given parameters."""
        weights = jnp.zeros((self.options.num_samples, self.elbo.bound.num_draws), shared.family.center.dtype)
        state = _optim.init(self.options.shared_optimizer, shared)
        return ServerState(shared, state, weights, jnp.zeros((), jnp.int32), num_units)

    def silo_init(self, key: Key, broadcast: Broadcast, data: SiloData) -> SiloState:
        r"""Start $\eta_{Lj}$ at the same point for every unit."""
        return self.silo_start(self.elbo.start_silo(key, broadcast.shared, data), broadcast, data)

    def silo_start(self, family: StructuredLocal, broadcast: Broadcast, data: SiloData) -> SiloState:
        """Start from given parameters."""
        shape = broadcast.weights.shape
        pending = jax.tree.map(lambda leaf: jnp.zeros((*shape, *leaf.shape), leaf.dtype), family)
        return SiloState(family, local_params.init(self.options.own_optimizer, family, data), pending)

    def participants(self, key: Key, state: ServerState) -> Participants:
        """All."""
        return self.options.participation.draw(key, state.round, state.num_units.shape[0])

    def broadcast(self, key: Key, state: ServerState) -> Broadcast:
        """Send the parameters, the key of the noise and the weights of the last round."""
        return Broadcast(state.shared, state.weights, jax.random.fold_in(key, state.round), state.round)

    def silo_step(
        self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData
    ) -> tuple[SiloState, Reply, SiloInfo]:
        """Take the step of the last round, whose weights are known now, and evaluate K draws of this one."""
        family, opt_state = self._catch_up(state, broadcast)
        draw = self.elbo.draw(key, broadcast.round, data, self._noise(broadcast))

        def one(noise, local_noise):
            single = draw._replace(noise=noise[None], local_noise=jax.tree.map(lambda leaf: leaf[None], local_noise))
            return jax.value_and_grad(self.elbo.silo, argnums=(0, 1))(broadcast.shared, family, single, data)

        values, gradients = jax.vmap(one)(draw.noise, draw.local_noise)
        values, (shared, pending) = jax.tree.map(self._apart, (values, gradients))
        return SiloState(family, opt_state, pending), Reply(values, shared), SiloInfo(jnp.zeros((), values.dtype))

    def server_step(
        self, state: ServerState, broadcast: Broadcast, replies: Reply, participants: Participants
    ) -> tuple[ServerState, ServerInfo]:
        """Weigh the draws by the sum of everyone's terms and take one step."""
        del participants  # all of them
        values, own = jax.vmap(jax.value_and_grad(self.elbo.server), (None, 0))(
            state.shared, self._noise(broadcast)[:, None]
        )
        values, own = jax.tree.map(self._apart, (values, own))
        log_weights = values + jnp.sum(replies.values, axis=0)
        weights = jax.nn.softmax(log_weights, axis=1)
        gradients = jax.tree.map(lambda mine, theirs: mine + jnp.sum(theirs, axis=0), own, replies.gradients)
        squared = self._of_family(weights)
        gradient = Shared(
            _weighted(squared, gradients.family),
            _weighted(weights, gradients.theta),
            _weighted(squared, gradients.network),
        )
        optimizer = self.options.shared_optimizer
        shared, opt_state = _optim.ascend(optimizer, gradient, state.opt_state, state.shared)
        bound = jnp.mean(jax.nn.logsumexp(log_weights, axis=1) - jnp.log(log_weights.shape[1]))
        following = ServerState(shared, opt_state, weights, state.round + 1, state.num_units)
        return following, ServerInfo(bound)

    def silent(self, broadcast: Broadcast) -> Reply:
        """K values and K gradients of zero."""
        shape = broadcast.weights.shape
        gradients = jax.tree.map(lambda leaf: jnp.zeros((*shape, *leaf.shape), leaf.dtype), broadcast.shared)
        return Reply(jnp.zeros_like(broadcast.weights), gradients)

    def silo_finish(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> StructuredLocal:
        r"""The silo's $q(z_{Lj} \mid z_G)$ after its last step, refitted if that was asked for."""
        family, _ = self._catch_up(state, broadcast)
        return refit(self.elbo, key, broadcast.shared, family, data, num_steps=self.options.refit_steps)

    def latents(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> Latents:
        """The first draw of `silo_step` at the same arguments, to find out what went wrong with it."""
        family, _ = self._catch_up(state, broadcast)
        draw = self.elbo.draw(key, broadcast.round, data, self._noise(broadcast))
        return self.elbo.latents(broadcast.shared, family, draw, data)

    def remarks(self, trace: dict) -> list[str]:
        """Nothing to say about the rounds done."""
        del trace
        return []

    def _catch_up(self, state, broadcast):
        gradient = _weighted(self._of_family(broadcast.weights), state.pending)
        stepped = local_params.ascend(self.options.own_optimizer, state.family, state.opt_state, gradient, {})
        unchanged = (state.family, state.opt_state)
        return jax.tree.map(lambda new, old: jnp.where(broadcast.round > 0, new, old), stepped, unchanged)

    def _of_family(self, weights):
        """The factors of gradients in what q is made of."""
        return weights**2 if self.options.estimator == "stl" else weights

    def _apart(self, leaf):
        return leaf.reshape(self.options.num_samples, self.elbo.bound.num_draws, *leaf.shape[1:])

    def _noise(self, broadcast):
        number = self.options.num_samples * self.elbo.bound.num_draws
        return self.elbo.global_noise(broadcast.key, broadcast.shared, number)


def _weighted(weights, gradients):
    """Sum over draws, mean over samples."""
    return jax.tree.map(lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, 2) / weights.shape[0], gradients)
