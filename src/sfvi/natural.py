r"""Gaussian factors in natural parameters, $\log t(z) = h^\top z - \tfrac12 z^\top P z$, whose products are sums.

A factor need not be a distribution: $P$ may have any sign, as that of one silo's site may.
"""

from typing import NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from ._types import GlobalVec, Scalar
from .errors import OptionError
from .families import AbstractGlobalFamily, FullGaussian, MeanFieldGaussian
from .families.triangular import pack, unpack

Gaussian: TypeAlias = MeanFieldGaussian | FullGaussian
Precision: TypeAlias = Float[Array, " n"] | Float[Array, "n n"]


class Natural(NamedTuple):
    """A Gaussian factor.

    Attributes:
        precision: P, a matrix, or its diagonal for mean field.
        shift: h.
    """

    precision: Precision
    shift: GlobalVec

    def log_factor(self, z_global: GlobalVec) -> Scalar:
        r"""Evaluate $h^\top z - \tfrac12 z^\top P z$."""
        return jnp.dot(self.shift - 0.5 * _apply(self.precision, z_global), z_global)

    def plus(self, other: "Natural", factor: Scalar | float = 1.0) -> "Natural":
        """The product with a power of another factor."""
        return jax.tree.map(lambda mine, theirs: mine + factor * theirs, self, other)

    def times(self, factor: Scalar | GlobalVec | float) -> "Natural":
        """A power of the factor; for mean field there may be one for each coordinate."""
        return jax.tree.map(lambda leaf: factor * leaf, self)


def as_gaussian(family: AbstractGlobalFamily) -> Gaussian:
    """The family, which must have natural parameters."""
    if isinstance(family, MeanFieldGaussian | FullGaussian):
        return family
    raise OptionError(
        f"Sites: the family {type(family).__name__} has no natural parameters of its own shape; choose "
        "global_family=families.mean_field() or full()."
    )


def natural(family: Gaussian) -> Natural:
    r"""The natural parameters of a Gaussian, $P = \Sigma^{-1}$ and $h = P \mu$."""
    if isinstance(family, MeanFieldGaussian):
        precision = jnp.exp(-2 * family.log_scale)
        return Natural(precision, precision * family.loc)
    inverse = _inverse_root(family)
    precision = inverse.T @ inverse
    return Natural(precision, precision @ family.loc)


def gaussian(factor: Natural) -> Gaussian:
    """The distribution with these natural parameters; P must be positive definite."""
    if factor.precision.ndim == 1:
        return MeanFieldGaussian(factor.shift / factor.precision, -0.5 * jnp.log(factor.precision))
    # P = U U^T with U upper triangular, by a Cholesky decomposition from the other end; then Sigma = U^-T U^-1.
    upper = jnp.linalg.cholesky(factor.precision[::-1, ::-1])[::-1, ::-1]
    lower = solve_triangular(upper, jnp.eye(upper.shape[0], dtype=upper.dtype), trans=1)
    scale = jnp.diagonal(lower)
    return FullGaussian(lower @ (lower.T @ factor.shift), jnp.log(scale), pack(lower / scale[:, None]))


def root(family: FullGaussian) -> Float[Array, "n n"]:
    r"""The lower triangular $S$ with $\Sigma = S S^\top$."""
    return jnp.exp(family.log_scale)[:, None] * unpack(family.lower, family.loc.shape[0])


def _inverse_root(family):
    return solve_triangular(root(family), jnp.eye(family.loc.shape[0], dtype=family.loc.dtype), lower=True)


def standard(family: Gaussian) -> Gaussian:
    """The standard normal of the same class and size."""
    return jax.tree.map(jnp.zeros_like, family)


def packed(factor: Natural) -> Natural:
    """The factor as it is sent: of a symmetric matrix only one half."""
    if factor.precision.ndim == 1:
        return factor
    return Natural(factor.precision[np.tril_indices(factor.shift.shape[0])], factor.shift)


def unpacked(factor: Natural, like: Natural) -> Natural:
    """Undo `packed` for a factor of the shape of `like`."""
    if like.precision.ndim == 1:
        return factor
    rows, columns = np.tril_indices(like.shift.shape[0])
    lower = jnp.zeros_like(like.precision).at[rows, columns].set(factor.precision)
    return Natural(lower + jnp.tril(lower, -1).T, factor.shift)


def relocated(family: Gaussian, loc: GlobalVec) -> Gaussian:
    """The same distribution around another mean."""
    return eqx.tree_at(lambda f: f.loc, family, loc)


def compose(outer: Gaussian, inner: Gaussian) -> Gaussian:
    r"""The distribution of $\mu + S u$ for $u$ from `inner`, where `outer` is $\mathrm{N}(\mu, S S^\top)$.

    The coordinates $u$ are standardized by `outer`: a step of 0.1 there is a tenth of its standard deviation.
    """
    log_scale = outer.log_scale + inner.log_scale
    if not (isinstance(outer, FullGaussian) and isinstance(inner, FullGaussian)):
        return MeanFieldGaussian(outer.loc + jnp.exp(outer.log_scale) * inner.loc, log_scale)
    size = outer.loc.shape[0]
    within = jnp.exp(inner.log_scale)
    turned = unpack(outer.lower, size) * within[None, :] / within[:, None]
    lower = turned @ unpack(inner.lower, size)
    return FullGaussian(outer.loc + root(outer) @ inner.loc, log_scale, pack(lower))


def clipped(change: Natural, base: Gaussian, loc: GlobalVec, lowest: Scalar) -> Natural:
    r"""The change, with its precision raised so that it takes away at most a share of that of `base`.

    The eigenvalues of $S^\top \Delta P\, S$ are raised to at least `lowest`, where $S S^\top$ is the covariance of
    `base`: then $P + \Delta P / |\mathrm{lowest}| \ge 0$. The mean that the change leads to, `loc`, stays.
    """
    before = natural(base)
    if isinstance(base, MeanFieldGaussian):
        precision = jnp.maximum(change.precision, lowest * before.precision)
    else:
        left = root(base)
        values, vectors = jnp.linalg.eigh(_symmetric(left.T @ change.precision @ left))
        lack = vectors @ (jnp.maximum(lowest - values, 0.0)[:, None] * vectors.T)
        inverse = _inverse_root(base)
        precision = _symmetric(change.precision + inverse.T @ lack @ inverse)
    return Natural(precision, _apply(before.precision + precision, loc) - before.shift)


def standardized(change: Natural, base: Gaussian) -> Natural:
    r"""A change in coordinates standardized by `base`, $S^\top \Delta P\, S$ and $S^\top (\Delta h - \Delta P \mu)$.

    To first order these are -2 times the change of the log sds and the change of the means in sds.
    """
    shift = change.shift - _apply(change.precision, base.center)
    if isinstance(base, MeanFieldGaussian):
        scale = jnp.exp(base.log_scale)
        return Natural(change.precision * scale**2, shift * scale)
    left = root(base)
    return Natural(left.T @ change.precision @ left, left.T @ shift)


def inner_product(left: Natural, right: Natural) -> Scalar:
    """Of two changes in standardized coordinates, where the Fisher information is that of a standard normal."""
    return jnp.vdot(left.shift, right.shift) + 0.5 * jnp.sum(left.precision * right.precision)


def _apply(precision, vector):
    return precision * vector if precision.ndim == 1 else precision @ vector


def _symmetric(matrix):
    return 0.5 * (matrix + matrix.T)
