"""Gaussian families of the global latents: mean field and full covariance."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import GlobalVec, Scalar
from .base import AbstractGlobalFamily, standard_normal_log_prob
from .triangular import multiply, packed_size, solve, unpack


class MeanFieldGaussian(AbstractGlobalFamily):
    r"""Independent Gaussians, $z_G = \mu + \sigma \odot \epsilon$.

    Attributes:
        loc: $\mu$.
        log_scale: $\log \sigma$.
    """

    loc: GlobalVec
    log_scale: GlobalVec

    @property
    def noise_size(self) -> int:
        return self.loc.shape[-1]

    @property
    def center(self) -> GlobalVec:
        return self.loc

    def sample(self, noise: Float[Array, " n_noise"]) -> GlobalVec:
        return self.loc + jnp.exp(self.log_scale) * noise

    def log_prob(self, z_global: GlobalVec) -> Scalar:
        noise = (z_global - self.loc) * jnp.exp(-self.log_scale)
        return standard_normal_log_prob(noise) - jnp.sum(self.log_scale)

    def marginals(self) -> tuple[GlobalVec, GlobalVec]:
        return self.loc, jnp.exp(self.log_scale)


class FullGaussian(AbstractGlobalFamily):
    r"""Gaussian with any covariance, $z_G = \mu + \sigma \odot (L \epsilon)$.

    $L$ is unit lower triangular, so $\Sigma = \mathrm{diag}(\sigma) L L^\top \mathrm{diag}(\sigma)$ and
    $\log\det\Sigma = 2 \sum \log \sigma$.

    Attributes:
        loc: $\mu$.
        log_scale: $\log \sigma$.
        lower: Entries of $L$ below its diagonal, see `triangular.unpack`.
    """

    loc: GlobalVec
    log_scale: GlobalVec
    lower: Float[Array, " n_lower"]

    @property
    def noise_size(self) -> int:
        return self.loc.shape[-1]

    @property
    def center(self) -> GlobalVec:
        return self.loc

    def sample(self, noise: Float[Array, " n_noise"]) -> GlobalVec:
        return self.loc + jnp.exp(self.log_scale) * (multiply(self._triangle(), noise))

    def standardized(self, z_global: GlobalVec) -> GlobalVec:
        r"""Invert `sample`: $\epsilon = L^{-1} (z_G - \mu) / \sigma$."""
        return solve(self._triangle(), (z_global - self.loc) * jnp.exp(-self.log_scale))

    def log_prob(self, z_global: GlobalVec) -> Scalar:
        return standard_normal_log_prob(self.standardized(z_global)) - jnp.sum(self.log_scale)

    def marginals(self) -> tuple[GlobalVec, GlobalVec]:
        row_norm = jnp.sqrt(jnp.sum(self._triangle() ** 2, axis=1))
        return self.loc, jnp.exp(self.log_scale) * row_norm

    def _triangle(self):
        return unpack(self.lower, self.loc.shape[-1])


def mean_field():
    """Independent Gaussians: 2 n parameters, for large $z_G$."""

    def build(loc: GlobalVec, scale: float) -> MeanFieldGaussian:
        return MeanFieldGaussian(loc, jnp.full_like(loc, jnp.log(scale)))

    return build


def full():
    """Gaussian with full covariance: n (n + 3) / 2 parameters."""

    def build(loc: GlobalVec, scale: float) -> FullGaussian | MeanFieldGaussian:
        if loc.shape[0] == 0:
            return mean_field()(loc, scale)
        lower = jnp.zeros(packed_size(loc.shape[0]), loc.dtype)
        return FullGaussian(loc, jnp.full_like(loc, jnp.log(scale)), lower)

    return build
