r"""The server's own site $t_0$: the prior itself where that is Gaussian, else a Gaussian factor in its place."""

import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from .. import _optim
from .._types import Scalar
from ..families import MeanFieldGaussian
from ..natural import Natural, as_gaussian, compose, natural, relocated, standard
from ..objectives import Shared
from .elbo import Elbo
from .tilted import Factor, flat

START_STEPS = 2000
START_SIZE = 0.05


def term(elbo: Elbo, shared: Shared, noise: Float[Array, "samples n_noise"]) -> Scalar:
    r"""Estimate $\mathrm{E}_q[\log p_\theta(z_G)]$."""
    population = elbo.model.population
    return jnp.mean(jax.vmap(lambda e: population.log_prob(shared.family.sample(e), shared.theta))(noise))


def is_exact(elbo: Elbo, shared: Shared) -> bool:
    """Whether the prior is a Gaussian factor of the family's own shape."""
    known = elbo.model.population.curvature
    return known.diagonal if isinstance(shared.family, MeanFieldGaussian) else known.constant


def is_refined(elbo: Elbo, shared: Shared) -> bool:
    """Whether the server has something to refine: its site, or parameters of the prior."""
    return not is_exact(elbo, shared) or elbo.model.population.curvature.parametrized


def exact(elbo: Elbo, shared: Shared) -> Factor | None:
    """The prior as a factor; None if it is not one."""
    if not is_exact(elbo, shared):
        return None

    def slope(z):
        return jax.grad(lambda z: elbo.model.population.log_prob(z, shared.theta))(z)

    zero = jnp.zeros_like(shared.family.center)
    if isinstance(shared.family, MeanFieldGaussian):
        precision = slope(zero) - slope(jnp.ones_like(zero))
    else:
        precision = -jax.jacfwd(slope)(zero)
    return _factor(Natural(precision, slope(zero)), shared)


@functools.partial(jax.jit, static_argnums=0)
def start(elbo: Elbo, shared: Shared) -> Factor:
    r"""$t_0$ before the first round, the same for the server and all silos: the Gaussian nearest to the prior."""
    known = exact(elbo, shared)
    if known is not None:
        return known
    base = as_gaussian(shared.family)
    outer, inner = relocated(standard(base), base.center), relocated(base, jnp.zeros_like(base.center))
    optimizer = optax.adam(optax.cosine_decay_schedule(START_SIZE, START_STEPS))
    key = jax.random.key(0)

    def objective(inner, noise):
        family = compose(outer, inner)
        return elbo.factor(lambda z: elbo.model.population.log_prob(z, shared.theta), family, noise)

    def step(carry, number):
        inner, state = carry
        noise = elbo.global_noise(jax.random.fold_in(key, number), shared, 1)
        return _optim.ascend(optimizer, jax.grad(objective)(inner, noise), state, inner), None

    (inner, _), _ = jax.lax.scan(step, (inner, _optim.init(optimizer, inner)), jnp.arange(START_STEPS))
    return _factor(natural(compose(outer, inner)), shared)


def _factor(latents, shared):
    points = flat((shared.theta, shared.network), shared.family.center.dtype)
    return Factor(latents, Natural(jnp.zeros_like(points), jnp.zeros_like(points)))
