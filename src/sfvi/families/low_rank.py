"""Gaussian family of the global latents with covariance of low rank plus diagonal."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import GlobalVec, Scalar
from ..errors import OptionError
from .base import LOG_2PI, AbstractGlobalFamily


class LowRankGaussian(AbstractGlobalFamily):
    r"""Gaussian with $\Sigma = \mathrm{diag}(\sigma)(I + F F^\top)\mathrm{diag}(\sigma)$.

    $z_G = \mu + \sigma \odot (\epsilon_1 + F \epsilon_2)$ with $F$ of shape n x r: n (r + 2) parameters, and
    every operation costs $O(n r^2)$ by the Woodbury identity.

    Attributes:
        loc: $\mu$.
        log_scale: $\log \sigma$.
        factor: $F$.
    """

    loc: GlobalVec
    log_scale: GlobalVec
    factor: Float[Array, "n_global rank"]

    @property
    def noise_size(self) -> int:
        return sum(self.factor.shape[-2:])

    @property
    def center(self) -> GlobalVec:
        return self.loc

    def sample(self, noise: Float[Array, " n_noise"]) -> GlobalVec:
        diagonal, common = jnp.split(noise, [self.loc.shape[0]])
        return self.loc + jnp.exp(self.log_scale) * (diagonal + self.factor @ common)

    def log_prob(self, z_global: GlobalVec) -> Scalar:
        size, rank = self.factor.shape
        scaled = (z_global - self.loc) * jnp.exp(-self.log_scale)
        # (I + F F')^-1 = I - F (I + F'F)^-1 F',  det(I + F F') = det(I + F'F)
        capacity = jnp.eye(rank, dtype=scaled.dtype) + self.factor.T @ self.factor
        cholesky = jnp.linalg.cholesky(capacity)
        projected = jax.scipy.linalg.solve_triangular(cholesky, self.factor.T @ scaled, lower=True)
        quadratic = jnp.sum(scaled**2) - jnp.sum(projected**2)
        half_log_det = jnp.sum(self.log_scale) + jnp.sum(jnp.log(jnp.diag(cholesky)))
        return -0.5 * (quadratic + size * LOG_2PI) - half_log_det

    def marginals(self) -> tuple[GlobalVec, GlobalVec]:
        row_norm = jnp.sqrt(1.0 + jnp.sum(self.factor**2, axis=1))
        return self.loc, jnp.exp(self.log_scale) * row_norm


def low_rank(*, rank: int = 10):
    """Gaussian with a diagonal plus `rank` common directions.

    The factor starts at small fixed waves: at zero its gradient would vanish.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise OptionError(f"low_rank: rank is {rank!r}; give a whole number of at least 1.")

    def build(loc: GlobalVec, scale: float) -> LowRankGaussian:
        size = loc.shape[0]
        rows = jnp.arange(size, dtype=loc.dtype)[:, None] + 0.5
        waves = jnp.arange(min(rank, size), dtype=loc.dtype)[None, :] + 1.0
        factor = 0.1 * jnp.cos(jnp.pi * rows * waves / size)
        return LowRankGaussian(loc, jnp.full_like(loc, jnp.log(scale)), factor)

    return build
