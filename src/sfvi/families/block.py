"""The local family: one Gaussian block per unit, following the global latents."""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..errors import OptionError
from .base import standard_normal_log_prob
from .triangular import multiply, packed_size, solve, unpack

MAX_COUPLING = 2**28  # entries of C: 1 GiB in float32

Values = Float[Array, "block units"]
Parent = Float[Array, " n_parent"]


class BlockGaussian(eqx.Module):
    r"""Independent Gaussian blocks $z_i$, one per unit $i$, given a parent deviation $d$.

    $$z_i = \mu_i + C_i d + \sigma_i(d) \odot (L_i \epsilon_i), \qquad \log\sigma_i(d) = s_i + D_i d$$

    $d = z_G - \mu_G$, followed, for units inside a silo that has latents of its own, by the residual of those.
    Every leaf has the units on its last axis: storage and cost are linear in their number, a minibatch is a
    selection along it, and a CPU vectorizes over it. $L = I$, $C = 0$ or $D = 0$ are stored as None.

    Attributes:
        loc: $\mu$.
        log_scale: $s$.
        lower: Entries of each $L_i$ below its diagonal, or None.
        coupling: $C$, or None.
        scale_coupling: $D$, or None.
    """

    loc: Values
    log_scale: Values
    lower: Float[Array, "n_lower units"] | None
    coupling: Float[Array, "n_parent block units"] | None
    scale_coupling: Float[Array, "n_parent block units"] | None

    def given(self, parent: Parent) -> "BlockGaussian":
        """The block at given parents: itself, for it follows them only through their deviation."""
        del parent
        return self

    def conditional(self, deviation: Parent) -> "BlockGaussian":
        """The block at a given deviation, which it no longer follows."""
        log_scale = _follow(self.log_scale, self.scale_coupling, deviation)
        return BlockGaussian(self.mean(deviation), log_scale, self.lower, None, None)

    def recentered(self, shift: Parent) -> "BlockGaussian":
        r"""The same distribution, with $d$ measured from a point that lies `shift` further.

        $\mu_i \leftarrow \mu_i + C_i\,\mathrm{shift}$, and likewise $s_i$; components of $d$ beyond those of `shift`
        stay as they are.
        """
        size = shift.shape[0]

        def move(intercept, slopes):
            return intercept if slopes is None else _follow(intercept, slopes[:size], shift)

        loc, log_scale = move(self.loc, self.coupling), move(self.log_scale, self.scale_coupling)
        return BlockGaussian(loc, log_scale, self.lower, self.coupling, self.scale_coupling)

    def mean(self, deviation: Parent) -> Values:
        r"""Evaluate $\mu_i + C_i d$."""
        return _follow(self.loc, self.coupling, deviation)

    def sample(self, noise: Values, deviation: Parent) -> Values:
        """Evaluate the equation above."""
        if self.lower is not None:
            noise = multiply(unpack(self.lower, noise.shape[0]), noise)
        log_scale = _follow(self.log_scale, self.scale_coupling, deviation)
        return self.mean(deviation) + jnp.exp(log_scale) * noise

    def log_prob(self, z_local: Values, deviation: Parent) -> Float[Array, " units"]:
        r"""Evaluate $\log q(z_i \mid d)$ of each unit."""
        log_scale = _follow(self.log_scale, self.scale_coupling, deviation)
        noise = (z_local - self.mean(deviation)) * jnp.exp(-log_scale)
        if self.lower is not None:
            noise = solve(unpack(self.lower, noise.shape[0]), noise)
        return standard_normal_log_prob(noise) - jnp.sum(log_scale, axis=0)


def _follow(intercept, slopes, deviation):
    return intercept if slopes is None else intercept + jnp.tensordot(deviation, slopes, 1)


def block(
    *,
    within: Literal["auto", "diagonal", "full"] = "auto",
    coupling: Literal["mean_and_scale", "mean", "none"] = "mean_and_scale",
):
    """Choose the local family.

    Args:
        within: Covariance inside a unit's block; "auto" is full up to 10 dimensions.
        coupling: What follows the global latents: the mean (`C`) and the log scale (`D`), the mean only (the paper's
            family), or nothing.
    """
    if within not in ("auto", "diagonal", "full"):
        raise OptionError(f"block: within is {within!r}; choose 'auto', 'diagonal' or 'full'.")
    if coupling not in ("mean", "mean_and_scale", "none"):
        raise OptionError(f"block: coupling is {coupling!r}; choose 'mean', 'mean_and_scale' or 'none'.")

    def build(units: int, size: int, parent: int, scale: float, dtype) -> BlockGaussian:
        if coupling != "none" and units * size * parent > MAX_COUPLING:
            raise OptionError(
                f"The coupling of {units} x {size} local latents to {parent} global ones needs "
                f"{units * size * parent:,} numbers; use local_family=families.block(coupling='none')."
            )
        full = within == "full" or (within == "auto" and size <= 10)
        slopes = None if coupling == "none" else jnp.zeros((parent, size, units), dtype)  # it may be very large
        return BlockGaussian(
            loc=jnp.zeros((size, units), dtype),
            log_scale=jnp.full((size, units), jnp.log(scale), dtype),
            lower=jnp.zeros((packed_size(size), units), dtype) if full and size > 1 else None,
            coupling=slopes,
            scale_coupling=slopes if coupling == "mean_and_scale" else None,
        )

    return build
