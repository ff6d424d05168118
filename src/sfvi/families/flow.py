"""Normalizing flow of the global latents; flowjax, which it is made of, is imported when one is asked for."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._types import GlobalVec, Scalar
from ..errors import OptionError
from .base import AbstractGlobalFamily, standard_normal_log_prob
from .triangular import multiply, packed_size, solve, unpack

DRAWS = 2048  # behind `marginals`


@dataclasses.dataclass(frozen=True)
class FlowSettings:
    """What `flow` chose: all that is needed to build the flow again, apart from its weights."""

    num_layers: int
    width: int
    knots: int


class NormalizingFlow(AbstractGlobalFamily):
    r"""A Gaussian bent by a flow, $z_G = \mu + \sigma \odot (L\, T_w(\epsilon))$.

    $$\log q(z_G) = \log N(\epsilon; 0, I) - \log\lvert\det \partial T_w / \partial \epsilon\rvert - \sum \log \sigma$$

    $L$ is unit lower triangular. $T_w$ is a chain of couplings: each leaves some coordinates as they are and maps the
    others one by one, $x_i \mapsto a_i + b_i\, s_i(x_i)$, where a small network sees the former and gives $a_i$, $b_i$
    and the monotone rational-quadratic spline $s_i$. A single coordinate has just a spline. All have closed inverses.
    The slope of a spline is 1 where it ends, so $\log q$ is continuous; otherwise gradients would be biased.

    With $T_w$ the identity, where it starts, this is `FullGaussian`.

    Attributes:
        loc: $\mu$.
        log_scale: $\log \sigma$.
        lower: Entries of $L$ below its diagonal, see `triangular.unpack`.
        weights: $w$, the arrays of a flowjax bijection.
        settings: What the user chose.
    """

    loc: GlobalVec
    log_scale: GlobalVec
    lower: Float[Array, " n_lower"]
    weights: PyTree[Float[Array, "..."]]
    settings: FlowSettings = eqx.field(static=True)

    @property
    def noise_size(self) -> int:
        return self.loc.shape[-1]

    @property
    def center(self) -> GlobalVec:
        return self.loc

    def sample(self, noise: Float[Array, " n_noise"]) -> GlobalVec:
        bent = self._bijection().transform(noise)
        return self.loc + jnp.exp(self.log_scale) * multiply(self._triangle(), bent)

    def log_prob(self, z_global: GlobalVec) -> Scalar:
        scaled = (z_global - self.loc) * jnp.exp(-self.log_scale)
        noise, log_det = self._bijection().inverse_and_log_det(solve(self._triangle(), scaled))
        return standard_normal_log_prob(noise) + log_det - jnp.sum(self.log_scale)

    def marginals(self) -> tuple[GlobalVec, GlobalVec]:
        """Mean and standard deviation over a fixed set of draws; exact while the flow is the identity."""
        return _marginals(self)

    def _triangle(self):
        return unpack(self.lower, self.loc.shape[-1])

    def _bijection(self):
        _, rest = _parts(self.settings, self.loc.shape[-1], self.loc.dtype)
        return eqx.combine(self.weights, rest)


def flow(*, num_layers: int = 2, width: int = 32, knots: int = 8):
    """A normalizing flow: posteriors that are skewed, bent or have heavy shoulders.

    It starts as the Gaussian of `full()` does and contains it. Needs `pip install sfvi[flows]`. There is no average
    of flows, so `SFVIAvg` refuses it.

    Args:
        num_layers: Layers; each changes every coordinate once. A single latent has one spline whatever this says.
        width: Hidden units of the networks.
        knots: Inner knots of the splines.
    """
    for name, value in (("num_layers", num_layers), ("width", width), ("knots", knots)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"flow: {name} is {value!r}; give a whole number of at least 1.")
    _bijections()
    settings = FlowSettings(num_layers, width, knots)

    def build(loc: GlobalVec, scale: float) -> NormalizingFlow:
        size = loc.shape[0]
        if size == 0:
            raise OptionError("flow: the model has no global latents; leave global_family out.")
        lower = jnp.zeros(packed_size(size), loc.dtype)
        weights, _ = _parts(settings, size, loc.dtype)
        return NormalizingFlow(loc, jnp.full_like(loc, jnp.log(scale)), lower, weights, settings)

    return build


def _bijections() -> Any:
    try:
        from . import _couplings
    except ImportError as error:
        raise OptionError("flow: flowjax is not installed; run pip install 'sfvi[flows]'.") from error
    return _couplings


@functools.lru_cache(maxsize=64)
def _parts(settings: FlowSettings, size: int, dtype: Any) -> tuple[Any, Any]:
    r"""$T_w$ at its start, apart: the weights, and all else. Made once, of concrete arrays even while JAX traces."""
    with jax.ensure_compile_time_eval():
        if size == 1:
            whole = _bijections().splines(size, settings.knots)
        else:
            whole = _bijections().couplings(size, settings.num_layers, settings.width, settings.knots)
        weights, rest = eqx.partition(whole, eqx.is_inexact_array)
        return jax.tree.map(lambda leaf: leaf.astype(dtype), weights), rest


@eqx.filter_jit
def _marginals(family):
    """Over draws in pairs of opposite sign with unit covariance, so that nothing is left to chance for a Gaussian."""
    size, dtype = family.noise_size, family.loc.dtype
    pairs = max(DRAWS // 2, 2 * size)
    orthogonal = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (pairs, size), dtype))[0]
    noise = jnp.sqrt(jnp.asarray(pairs, dtype)) * jnp.concatenate([orthogonal, -orthogonal])
    draws = jax.vmap(family.sample)(noise)
    return jnp.mean(draws, axis=0), jnp.std(draws, axis=0)
