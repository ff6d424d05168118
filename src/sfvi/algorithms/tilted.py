r"""One participant's problem in a round of Sites: its own term against what the others' sites say.

The participant owns one factor $t_j$ of $q(z_G) = \prod_i t_i(z_G)$ and looks for the best Gaussian

$$\max_{q'} \; \mathrm{E}_{q'}[k \mathcal{L}_j(z_G) + \log (q / t_j^k)(z_G) - \log q'(z_G)]$$

in coordinates standardized by $q$, so that step sizes have the same meaning in every model and round, and takes the
$k$-th part of the change.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from .._types import GlobalVec, Scalar
from ..natural import Gaussian, Natural, as_gaussian, clipped, compose, gaussian, natural, relocated, standard
from ..objectives import Shared
from .elbo import Elbo

KEPT = 0.3  # share of its precision that q(z_G) keeps at least in one round, in every direction
LOOSE = 1e-2  # smallest precision of a point estimate, all participants together

Points = tuple
Curvature = Float[Array, " n_points"]


class Factor(NamedTuple):
    r"""A site: a Gaussian factor of $z_G$, and one of the point estimates $(\theta, \phi)$.

    The latter has a diagonal precision: not a spread that was fitted, but the curvature of the participant's own term,
    by which one participant foresees how much the others will resist when it moves a point estimate.
    """

    latents: Natural
    points: Natural

    def plus(self, other: "Factor", power: Scalar | float = 1.0) -> "Factor":
        """The product with a power of another factor."""
        return jax.tree.map(lambda mine, theirs: mine + power * theirs, self, other)

    def times(self, power: Scalar | float) -> "Factor":
        """A power of the factor."""
        return jax.tree.map(lambda leaf: power * leaf, self)


class Tilted(NamedTuple):
    r"""The problem: coordinates $z_G = \mu + S u$, where to start in them, $q$, and what the others say.

    Attributes:
        outer: $\mathrm{N}(\mu, S S^\top)$.
        start: $q$ in terms of $u$.
        total: $q$ as a factor.
        cavity: $q / t_j^k$.
        copies: $k$: how many participants like this one make up the whole, or 1 if factors speak for the others.
        hold: $w$, by which a mean-field $q'$ is held to $q$ where the cavity has a negative precision, as a part of the
            precision of $q$; None otherwise.
        points_hold: The same for the point estimates, as a precision.
        first: Whether this is the first round, where $q$ is but a guess.
    """

    outer: Gaussian
    start: Gaussian
    total: Factor
    cavity: Factor
    copies: Scalar
    hold: GlobalVec | None
    points_hold: Curvature
    first: Bool[Array, ""]

    def family(self, inner: Gaussian) -> Gaussian:
        """$q'$ in the model's own coordinates."""
        return compose(self.outer, inner)

    def objective(
        self,
        elbo: Elbo,
        inner: Gaussian,
        points: Points,
        noise: Float[Array, "samples n_noise"],
        term: Callable[[Shared], Scalar],
    ) -> Scalar:
        """Estimate what is maximized over $q'$, given by `inner`, and the point estimates."""
        shared = Shared(self.family(inner), *points)
        others = elbo.factor(self.cavity.latents.log_factor, shared.family, noise)
        there = flat(points, others.dtype)
        value = self.copies * term(shared) + others + self.cavity.points.log_factor(there)
        value = value - 0.5 * jnp.dot(self.points_hold, (there - self.here) ** 2)
        return value if self.hold is None else value - jnp.dot(self.hold, divergence(inner))

    @property
    def here(self) -> Curvature:
        """The point estimates of the broadcast."""
        return self.total.points.shift / self.total.points.precision

    def change(self, inner: Gaussian, points: Points, curvature: Curvature, sharers: Scalar, damping: Scalar) -> Factor:
        r"""By how much the participant changes its site, having found `inner` and the point estimates.

        If everyone clips its change to at least $-(1 - \mathrm{KEPT}) / (\rho n)$ of the precision of $q$, then all n
        changes together leave $q$ the share KEPT of it, whatever they are: positive definiteness cannot be lost.

        In natural parameters $\lambda$ the gradient of $k \mathcal{L}_j$ at the optimum is
        $k \lambda_j + (1 + w)(\lambda' - \lambda)$: the site that matches has changed by $(1 + w) / k$ of that.
        """
        found, base = self.family(inner), self.family(self.start)
        power = 1.0 / self.copies
        latents = natural(found).plus(self.total.latents, -1.0)
        latents = latents.times(power if self.hold is None else jnp.minimum(power * (1.0 + self.hold), 1.0))
        lowest = jnp.where(self.first, -1e6, -(1 - KEPT) / (sharers * damping)).astype(power.dtype)
        mean = gaussian(self.total.latents.plus(latents)).center
        latents = clipped(latents, base, mean, lowest)
        precision = self.cavity.points.precision + self.copies * curvature
        held = (precision + self.points_hold) * (flat(points, precision.dtype) - self.here)
        moved = Natural(precision, precision * self.here + held)
        return Factor(latents, moved.plus(self.total.points, -1.0).times(power)).times(damping)


def tilted(shared: Shared, points_precision: Curvature, site: Factor, copies: Scalar, first: Bool[Array, ""]) -> Tilted:
    """Set up the problem.

    Args:
        shared: $q$ and the point estimates.
        points_precision: Of the point estimates, all sites together.
        site: $t_j$.
        copies: See `Tilted`.
        first: In the first round coordinates are those of the model.
    """
    base = as_gaussian(shared.family)
    points = flat((shared.theta, shared.network), base.center.dtype)
    total = Factor(natural(base), Natural(points_precision, points_precision * points))
    origin = standard(base)
    plain, within = relocated(origin, base.center), relocated(base, origin.center)

    def choose(one, other):
        return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)

    cavity, hold = total.plus(site, -copies), None
    if total.latents.precision.ndim == 1:
        hold = jnp.where(first, 0.0, jnp.maximum(-cavity.latents.precision / total.latents.precision, 0.0))
    points_hold = jnp.maximum(-cavity.points.precision, 0.0)
    return Tilted(choose(plain, base), choose(within, origin), total, cavity, copies, hold, points_hold, first)


def divergence(inner: Gaussian) -> GlobalVec:
    r"""$\mathrm{KL}(q' \,\|\, q)$ of every coordinate, given $q'$ in coordinates where $q$ is standard."""
    return 0.5 * (inner.loc**2 + jnp.expm1(2 * inner.log_scale)) - inner.log_scale


def flat(points: Points, dtype) -> Float[Array, " n_points"]:
    """The point estimates as one vector."""
    return ravel_pytree(points)[0].astype(dtype)


def unflatten(vector: Float[Array, " n_points"], shared: Shared) -> Points:
    """The point estimates from a vector, like those of `shared`."""
    like, rebuild = ravel_pytree((shared.theta, shared.network))
    return rebuild(vector.astype(like.dtype))


def curvature(
    term: Callable[[Shared], Scalar], shared: Shared, key, *, num_probes: int, floor: Scalar | float
) -> Curvature:
    r"""Estimate $|\mathrm{diag}(-\partial^2 \mathcal{L}_j)|$ in the point estimates, by random signs (Hutchinson)."""
    vector, dtype = flat((shared.theta, shared.network), shared.family.center.dtype), shared.family.center.dtype
    if vector.size == 0:
        return vector

    def value(vector):
        return term(Shared(shared.family, *unflatten(vector, shared)))

    def probe(key):
        signs = jax.random.rademacher(key, vector.shape, dtype)
        return -signs * jax.grad(lambda point: jnp.vdot(jax.grad(value)(point), signs))(vector)

    probes = jax.lax.map(probe, jax.random.split(key, num_probes))
    return jnp.maximum(jnp.abs(jnp.mean(probes, axis=0)), floor)
