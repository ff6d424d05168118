"""SFVI: Algorithm 1 of the paper, completed by the server's own term."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int
from numpyro.infer import init_to_feasible

from .. import _optim, families
from .._types import GlobalVec, Indices, Key, Scalar, Theta
from ..errors import OptionError
from ..families import AbstractGlobalFamily, Local, StructuredLocal
from ..model import SiloData, StructuredModel
from ..objectives import Estimator, freezer, server_term, silo_term
from . import local_params
from .noise import global_noise, local_noise

MAX_FULL = 200  # global dimensions up to which the default family has full covariance


def slow_decay(step):
    """The default step size, 0.02 / (1 + step / 1000)^0.75: large at first, and no end of the run has to be known."""
    return 0.02 * (1.0 + step / 1000.0) ** -0.75


class ServerState(NamedTuple):
    r"""$\eta_G$, $\theta$, the state of their optimizer, and the number of the next round."""

    family: AbstractGlobalFamily
    theta: Theta
    opt_state: optax.OptState
    round: Int[Array, ""]


class SiloState(NamedTuple):
    r"""$\eta_{Lj}$ and the state of its optimizer. It never leaves the silo."""

    family: StructuredLocal
    opt_state: local_params.LocalOptState


class Broadcast(NamedTuple):
    r"""All that the server sends: $\eta_G$, $\theta$, and the key from which every silo makes the same $\epsilon_G$."""

    family: AbstractGlobalFamily
    theta: Theta
    key: Key
    round: Int[Array, ""]


class Reply(NamedTuple):
    r"""All that a silo sends: $g^\eta_j = \partial \mathcal{L}_j / \partial \eta_G$ and $g^\theta_j$."""

    family_gradient: AbstractGlobalFamily
    theta_gradient: Theta


class SiloInfo(NamedTuple):
    r"""The silo's estimate of $\mathcal{L}_j$; stays in the silo."""

    elbo_term: Scalar


class ServerInfo(NamedTuple):
    r"""The server's estimate of $\mathcal{L}_0$."""

    elbo_term: Scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFVI:
    r"""Structured federated variational inference: the trajectory of pooled data, one exchange a step.

    With the same noise, any split of the units over silos gives the same $\eta_G$, $\theta$ and local
    parameters, provided that the optimizers work elementwise (no clipping by a global norm).

    Args:
        optimizer: Optax optimizer of $\eta_G$ and $\theta$ at the server; by default Adam, step size `slow_decay`. It
            sees the pair `(family, theta)`.
        local_optimizer: Optimizer of $\eta_L$ in the silos; the same as `optimizer` if None. In a minibatched
            plate every unit has its own state, so a schedule there counts the unit's own updates.
        global_family: $q(z_G)$: `families.mean_field()`, `full()` or `low_rank()`. By default full up to 200
            dimensions and mean field beyond.
        local_family: $q(z_L \mid z_G)$: `families.block(...)`.
        num_samples: Monte Carlo samples per step.
        estimator: "stl" (default) or "reparameterization".
        init_loc_fn: NumPyro strategy for the initial mean of the global latents.
        init_scale: Initial standard deviation of every latent in unconstrained space.
    """

    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adam(slow_decay))
    local_optimizer: optax.GradientTransformation | None = None
    global_family: Callable[..., AbstractGlobalFamily] | None = None
    local_family: Callable[..., Any] = dataclasses.field(default_factory=families.block)
    num_samples: int = 1
    estimator: Estimator = "stl"
    init_loc_fn: Callable = init_to_feasible
    init_scale: float = 0.1

    def __post_init__(self):
        freezer(self.estimator)
        for name in ("optimizer", "local_optimizer"):
            _check_optimizer(name, getattr(self, name), optional=name == "local_optimizer")
        for name, example in (("global_family", "full"), ("local_family", "block")):
            chosen = getattr(self, name)
            uncalled = chosen in (families.full, families.mean_field, families.low_rank, families.block)
            if uncalled or not (callable(chosen) or (chosen is None and name == "global_family")):
                raise OptionError(f"{name} is {chosen!r}; give what families.{example}() returns, or another family.")
        if not isinstance(self.num_samples, int) or self.num_samples < 1:
            raise OptionError(f"num_samples is {self.num_samples!r}; give a whole number of at least 1.")
        if not isinstance(self.init_scale, int | float) or not 0 < self.init_scale < float("inf"):
            raise OptionError(f"init_scale is {self.init_scale!r}; give a positive number.")
        if not callable(self.init_loc_fn):
            raise OptionError(f"init_loc_fn is {self.init_loc_fn!r}; give a NumPyro strategy, like init_to_feasible.")

    def bind(self, model: StructuredModel) -> "BoundSFVI":
        """Make the five functions for a model."""
        return BoundSFVI(self, model)


def _check_optimizer(name, chosen, *, optional):
    if chosen is None and optional:
        return
    if not isinstance(chosen, optax.GradientTransformation):
        raise OptionError(f"{name} is {chosen!r}; give an optax optimizer, like optax.adam(1e-2).")
    try:
        _optim.is_elementwise(chosen)
    except TypeError as error:
        raise OptionError(f"{name} needs more than gradients ({error}); choose another optax optimizer.") from error


class BoundSFVI(NamedTuple):
    """The five functions of SFVI for one model."""

    options: SFVI
    model: StructuredModel

    @property
    def additive(self) -> bool:
        """True if no optimizer couples the units of a silo: then silos may be computed as if they were one."""
        return _optim.is_elementwise(self._local_optimizer)

    def server_init(self, key: Key, theta: Theta) -> ServerState:
        r"""Start $\eta_G$ and $\theta$."""
        loc = self.model.population.initial(key, self.options.init_loc_fn)
        build = self.options.global_family
        if build is None:
            build = families.full() if 0 < loc.size <= MAX_FULL else families.mean_field()
        family = build(loc, self.options.init_scale)
        opt_state = _optim.init(self.options.optimizer, (family, theta))
        return ServerState(family, theta, opt_state, jnp.zeros((), jnp.int32))

    def silo_init(self, key: Key, data: SiloData) -> SiloState:
        r"""Start $\eta_{Lj}$ at the same point for every unit."""
        del key
        n_global = self.model.population.layout.size
        family = local_params.build(self.options.local_family, data, n_global, self.options.init_scale)
        return SiloState(family, local_params.init(self._local_optimizer, family, data))

    def broadcast(self, key: Key, state: ServerState) -> Broadcast:
        """Send the parameters and the key of the noise."""
        round_key = jax.random.fold_in(key, state.round)
        return Broadcast(state.family, state.theta, round_key, state.round)

    def silo_step(
        self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData
    ) -> tuple[SiloState, Reply, SiloInfo]:
        r"""Ascend $\mathcal{L}_j$ in $\eta_{Lj}$ and reply with its gradients in $\eta_G$ and $\theta$.

        One reverse pass gives all three; the gradient in $\eta_G$ takes both paths, through $z_G$ and through $z_L$.
        """
        indices = data.draw(jax.random.fold_in(key, broadcast.round))
        noise = self._global_noise(broadcast)
        own_noise = local_noise(key, broadcast.round, data, indices, self.options.num_samples, noise.dtype)

        def term(family, theta, local, noise, own_noise):
            return silo_term(data, family, theta, local, noise, own_noise, indices, estimator=self.options.estimator)

        def mean_term(family, theta, local):
            return self._mean(term, (family, theta, local), (noise, own_noise))

        value, gradients = jax.value_and_grad(mean_term, argnums=(0, 1, 2))(
            broadcast.family, broadcast.theta, local_params.select(state.family, indices)
        )
        family, opt_state = local_params.ascend(
            self._local_optimizer, state.family, state.opt_state, gradients[2], indices
        )
        return SiloState(family, opt_state), Reply(*gradients[:2]), SiloInfo(value)

    def server_step(self, state: ServerState, broadcast: Broadcast, replies: Reply) -> tuple[ServerState, ServerInfo]:
        r"""Add the server's own gradient of $\mathcal{L}_0$ to the sum of the replies and take one step."""
        noise = self._global_noise(broadcast)

        def term(family, theta, noise):
            return server_term(self.model.population, family, theta, noise, estimator=self.options.estimator)

        def mean_term(family, theta):
            return self._mean(term, (family, theta), (noise,))

        params = (state.family, state.theta)
        value, own = jax.value_and_grad(mean_term, argnums=(0, 1))(*params)
        gradient = jax.tree.map(lambda mine, theirs: mine + theirs.sum(0), own, tuple(replies))
        (family, theta), opt_state = _optim.ascend(self.options.optimizer, gradient, state.opt_state, params)
        return ServerState(family, theta, opt_state, state.round + 1), ServerInfo(value)

    def latents(
        self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData
    ) -> tuple[GlobalVec, Local, Indices]:
        """The first draw of `silo_step` at the same arguments, to find out what went wrong with it."""
        indices = data.draw(jax.random.fold_in(key, broadcast.round))
        noise = self._global_noise(broadcast)
        own_noise = local_noise(key, broadcast.round, data, indices, self.options.num_samples, noise.dtype)
        first = jax.tree.map(lambda leaf: leaf[0], own_noise)
        z_global = broadcast.family.sample(noise[0])
        rows = local_params.select(state.family, indices)
        return z_global, rows.sample(first, z_global - broadcast.family.center), indices

    @property
    def _local_optimizer(self):
        return self.options.local_optimizer or self.options.optimizer

    def _global_noise(self, broadcast):
        family = broadcast.family
        return global_noise(broadcast.key, self.options.num_samples, family.noise_size, family.center.dtype)

    def _mean(self, term, params, noises):
        """Average a term over Monte Carlo samples, the first axis of the noises."""
        if self.options.num_samples == 1:
            return term(*params, *jax.tree.map(lambda noise: noise[0], noises))
        axes = (*[None] * len(params), *[0] * len(noises))
        return jax.vmap(term, axes)(*params, *noises).mean()
