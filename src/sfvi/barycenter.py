r"""Average Gaussians as distributions: the weighted 2-Wasserstein barycenter of members of a global family.

$$\bar q = \arg\min_q \sum_j w_j W_2^2(q, q_j)$$

All of it runs in float64, whatever JAX is set to, and can be compiled into a larger loop.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._types import GlobalVec, Scalar
from .errors import OptionError
from .families import AbstractGlobalFamily, FullGaussian, LowRankGaussian, MeanFieldGaussian
from .families.triangular import pack, unpack

Family = TypeVar("Family", bound=AbstractGlobalFamily)
Weights: TypeAlias = Float[Array, " silos"]
Root: TypeAlias = Float[Array, "n r"]
Roots: TypeAlias = Float[Array, "k n r"]
Count: TypeAlias = int | Int[Array, ""]

TOLERANCE = 1e-12
MAX_ITERATIONS = 1000
PATIENCE = 20  # evaluations without a new best ...
PLATEAU = 1e-6  # ... below this residual: only rounding is left
MEMORY = 6  # differences that the acceleration looks back on


class Barycenter(NamedTuple):
    """An averaged family, and how well the equation it solves is met.

    Attributes:
        family: The average, of the class and dtype of the members.
        residual: Relative change by one step of the fixed-point iteration; 0 for closed forms.
        iterations: Evaluations of the fixed-point map; 0 for closed forms.
    """

    family: AbstractGlobalFamily
    residual: Scalar
    iterations: Int[Array, ""]


@functools.singledispatch
def barycenter(stacked: AbstractGlobalFamily, weights: Weights) -> Barycenter:
    r"""Average the members of a family, $\arg\min_q \sum_j w_j W_2^2(q, q_j)$.

    Args:
        stacked: The $q_j$: one family whose leaves all have a leading axis over silos.
        weights: $w_j \ge 0$, brought to sum one here. A member of weight zero is not looked at.

    Raises:
        OptionError: Averages of this family are not defined.
    """
    raise OptionError(
        f"barycenter: the family {type(stacked).__name__} cannot be averaged; choose mean_field, full or low_rank for "
        "the global latents, or an algorithm that does not average, such as SFVI."
    )


@barycenter.register
def _mean_field(stacked: MeanFieldGaussian, weights: Weights) -> Barycenter:
    r"""Average independent Gaussians, exactly: $\mu = \sum_j w_j \mu_j$, $\sigma = \sum_j w_j \sigma_j$."""
    with jax.enable_x64(True):
        members, w = _prepare(stacked, weights)
        return _report(MeanFieldGaussian(w @ members.loc, _mean_log_scale(w, members.log_scale)), stacked)


@barycenter.register
def _full(stacked: FullGaussian, weights: Weights, *, max_iterations: Count = MAX_ITERATIONS) -> Barycenter:
    r"""Average Gaussians of any covariance.

    $\mu = \sum_j w_j \mu_j$, and $S = \sum_j w_j (S^{1/2} S_j S^{1/2})^{1/2}$ is solved on roots, $S = A A^\top$ and
    $S_j = B_j B_j^\top$ with $B_j = \mathrm{diag}(\sigma_j) L_j$, see `_procrustes`. The residual is
    $\lVert A^{-1} A' - I \rVert_F / \sqrt n$, $A'$ being the image of $A$: it has no units, and directions of small
    variance count as much as others. The relative error of $S$ is larger by $1/(1 - \rho)$ with $\rho$ the rate
    of the plain iteration, about 100 for condition numbers of $10^6$ in unrelated directions.
    """
    with jax.enable_x64(True):
        members, w = _prepare(stacked, weights)
        size = members.loc.shape[1]
        if size == 0:
            return _report(jax.tree.map(lambda leaf: leaf[0], members), stacked)
        roots = jnp.exp(members.log_scale)[:, :, None] * jax.vmap(lambda lower: unpack(lower, size))(members.lower)

        def residual(root, image):
            return jnp.linalg.norm(jnp.linalg.solve(root, image) - jnp.eye(size)) / size**0.5

        # The mean covariance has the root R' of the QR of the stacked sqrt(w_j) B_j': no product is formed.
        weighted = jnp.sqrt(w)[:, None, None] * jnp.swapaxes(roots, 1, 2)
        start = jnp.linalg.qr(weighted.reshape(-1, size), mode="r").T
        solution = _procrustes(roots, w, start, residual, max_iterations)

        triangle = jnp.linalg.qr(solution.root.T, mode="r").T
        diagonal = jnp.diagonal(triangle)  # of either sign, as the columns of a root are
        lower = pack(triangle * jnp.sign(diagonal)[None, :] / jnp.abs(diagonal)[:, None])
        return _report(FullGaussian(w @ members.loc, jnp.log(jnp.abs(diagonal)), lower), stacked, solution)


@barycenter.register
def _low_rank(stacked: LowRankGaussian, weights: Weights, *, max_iterations: Count = MAX_ITERATIONS) -> Barycenter:
    r"""Average Gaussians of low rank plus diagonal, part by part.

    A member is $z_j = \mu_j + u_j + v_j$ with independent $u_j \sim N(0, \mathrm{diag}(\sigma_j^2))$ and
    $v_j \sim N(0, G_j G_j^\top)$, $G_j = \mathrm{diag}(\sigma_j) F_j$. Their barycenter is not of this form, so the
    average $z = \mu + u + v$ is transported to them only by plans that take $u$ to $u_j$ and $v$ to $v_j$:

    $$\min_{\sigma, G} \sum_j w_j \left[W_2^2(u, u_j) + W_2^2(v, v_j)\right]
      = \min_{\sigma, G, R_j^\top R_j = I}
        \sum_j w_j \left[\lVert \sigma - \sigma_j \rVert^2 + \lVert G - G_j R_j \rVert_F^2\right].$$

    Hence $\sigma = \sum_j w_j \sigma_j$, and $G$ is a generalized Procrustes average, see `_procrustes`. The residual
    is $\lVert G' - G \rVert_F / \lVert G' \rVert_F$.

    What this is: the barycenter itself if $r = 0$, if there is one member, or if the members are shifted multiples
    of one, $\mu_j + c_j (u + v)$. Otherwise it minimizes an upper bound of $\sum_j w_j W_2^2(q, q_j)$, and its
    total variance is at most that of the barycenter.

    What it is not: a function of the covariances, as it depends on how each is split into $\sigma$ and $F$; exact for
    all covariances that commute; or surely the least bound. With $r < n$ the problem has local minima ($r = 1$ is
    a choice of signs). Started as here from the best rank-$r$ root of $\sum_j w_j G_j G_j^\top$, the iteration found
    the least of ten random starts whenever members resembled each other, and came within a tenth of it otherwise.

    A QR of all $G_j$ side by side costs $O(n J^2 r^2)$ once; no iteration depends on $n$ after that.
    """
    with jax.enable_x64(True):
        members, w = _prepare(stacked, weights)
        silos, size, rank = members.factor.shape
        loc, log_scale = w @ members.loc, _mean_log_scale(w, members.log_scale)
        if size == 0 or rank == 0:
            return _report(LowRankGaussian(loc, log_scale, members.factor[0]), stacked)
        scaled = jnp.exp(members.log_scale)[:, :, None] * members.factor
        basis, coordinates = jnp.linalg.qr(jnp.moveaxis(scaled, 0, 1).reshape(size, silos * rank))
        roots = jnp.moveaxis(coordinates.reshape(-1, silos, rank), 1, 0)

        weighted = coordinates * jnp.repeat(jnp.sqrt(w), rank)[None, :]
        left, singular, _ = jnp.linalg.svd(weighted, full_matrices=False)
        missing = max(0, rank - len(singular))  # columns, if n < r
        start = jnp.pad((left * singular[None, :])[:, :rank], [(0, 0), (0, missing)])
        solution = _procrustes(roots, w, start, _relative_change, max_iterations)

        factor = (basis @ solution.root) * jnp.exp(-log_scale)[:, None]
        return _report(LowRankGaussian(loc, log_scale, factor), stacked, solution)


class _Solution(NamedTuple):
    root: Root
    residual: Scalar
    iterations: Int[Array, ""]


class _State(NamedTuple):
    iterations: Int[Array, ""]
    waited: Int[Array, ""]  # since `best`
    best: Root
    best_residual: Scalar
    point: Root  # to be evaluated next
    is_plain: Bool[Array, ""]  # whether it is the last image rather than extrapolated
    image: Root  # of the last point accepted, and so on
    step: Root  # image minus point
    residual: Scalar
    objective: Scalar
    images: Roots  # differences of successive images and steps, newest first, zero where there are none
    steps: Roots


def _procrustes(
    roots: Roots, weights: Weights, start: Root, residual_fn: Callable[[Root, Root], Scalar], max_iterations: Count
) -> _Solution:
    r"""Average roots up to rotation: minimize $\sum_j w_j \lVert A - B_j R_j \rVert_F^2$ over $A$ and orthogonal $R_j$.

    Given $A$ the best $R_j$ is $\mathrm{polar}(B_j^\top A)$, with $\mathrm{polar}(M) = U V^\top$ of the SVD
    $M = U s V^\top$; given the $R_j$ the best $A$ is the mean. So iterate

    $$A \leftarrow \sum_j w_j B_j \,\mathrm{polar}(B_j^\top A).$$

    For square roots of $S = A A^\top$ this is the iteration of Alvarez-Esteban et al. (2016),
    $S \leftarrow S^{-1/2} [\sum_j w_j (S^{1/2} S_j S^{1/2})^{1/2}]^2 S^{-1/2}$. As
    $\mathrm{polar}(M) = M (M^\top M)^{-1/2}$,

    $$B_j \,\mathrm{polar}(B_j^\top A) = S_j A (A^\top S_j A)^{-1/2} = A^{-\top} (A^\top S_j A)^{1/2} = T_j A,$$

    $T_j = A^{-\top} (A^\top S_j A)^{1/2} A^{-1}$ being the optimal map: symmetric, and $T_j S T_j = S_j$. No
    product of a root with itself is formed, so no condition number is squared.

    The iteration descends, but at a rate near 1 if members are ill-conditioned in different directions; Anderson
    acceleration (1965) makes hundreds of iterations tens.
    """

    def unfinished(state):
        waits = (state.waited < PATIENCE) | (state.best_residual > PLATEAU)
        return (state.best_residual > TOLERANCE) & waits & (state.iterations < max_iterations)  # ends at NaN

    def advance(state):
        left, singular, right = jnp.linalg.svd(jnp.swapaxes(roots, 1, 2) @ state.point, full_matrices=False)
        image = jnp.einsum("j,jab->ab", weights, roots @ (left @ right))
        objective = 0.5 * jnp.sum(state.point**2) - weights @ jnp.sum(singular, axis=1)
        return _accelerate(state, image, objective, residual_fn(state.point, image))

    zero, infinity, yes = jnp.zeros((), jnp.int32), jnp.array(jnp.inf, jnp.float64), jnp.ones((), bool)
    history = jnp.zeros((MEMORY, *start.shape), jnp.float64)
    state = _State(zero, zero, start, infinity, start, yes, start, start, infinity, infinity, history, history)
    state = jax.lax.while_loop(unfinished, advance, state)
    return _Solution(state.best, state.best_residual, state.iterations)


def _accelerate(state: _State, image: Root, objective: Scalar, residual: Scalar) -> _State:
    r"""Choose the next point: an extrapolation if the last one was good, else back to the plain iteration.

    Good is what lowers the objective, or, where rounding hides its change, what does not double the residual.
    """
    step = image - state.point
    slack = 1e-13 * jnp.sum(image**2)
    steady = (objective < state.objective + slack) & (residual < 2.0 * state.residual)
    accepted = state.is_plain | (objective < state.objective - slack) | steady

    is_first = state.iterations == 0
    images = jnp.where(is_first, 0.0, jnp.roll(state.images, 1, axis=0).at[0].set(image - state.image))
    steps = jnp.where(is_first, 0.0, jnp.roll(state.steps, 1, axis=0).at[0].set(step - state.step))
    is_best = ~(residual >= state.best_residual)
    taken = _State(
        iterations=state.iterations + 1,
        waited=jnp.where(is_best, 0, state.waited + 1),
        best=jnp.where(is_best, image, state.best),
        best_residual=jnp.where(is_best, residual, state.best_residual),
        point=image - _correction(images, steps, step),
        is_plain=is_first,
        image=image,
        step=step,
        residual=residual,
        objective=objective,
        images=images,
        steps=steps,
    )
    refused = state._replace(
        iterations=state.iterations + 1,
        waited=state.waited + 1,
        point=state.image,
        is_plain=jnp.ones((), bool),
        images=jnp.zeros_like(images),
        steps=jnp.zeros_like(steps),
    )
    return jax.tree.map(lambda yes, no: jnp.where(accepted, yes, no), taken, refused)


def _correction(images: Roots, steps: Roots, step: Root) -> Root:
    r"""Evaluate $\sum_i \gamma_i \Delta g_i$, $\gamma = \arg\min \lVert f - \sum_i \gamma_i \Delta f_i \rVert_F$."""
    lengths = jnp.sqrt(jnp.sum(steps**2, axis=(1, 2)))
    inverse = jnp.where(lengths > 0, 1.0 / jnp.where(lengths > 0, lengths, 1.0), 0.0)
    directions = inverse[:, None, None] * steps
    gram = jnp.einsum("iab,kab->ik", directions, directions) + 1e-13 * jnp.eye(len(steps))
    gamma = jnp.linalg.solve(gram, jnp.einsum("iab,ab->i", directions, step))
    return jnp.einsum("i,iab->ab", gamma * inverse, images)


def _relative_change(root: Root, image: Root) -> Scalar:
    length = jnp.linalg.norm(image)
    return jnp.linalg.norm(image - root) / jnp.where(length == 0, 1.0, length)


def _prepare(stacked: Family, weights: Weights) -> tuple[Family, Weights]:
    """Members and weights in float64, weights of sum one, members of weight zero blanked out."""
    w = weights.astype(jnp.float64)

    def blank(leaf):
        present = (w != 0).reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(present, leaf.astype(jnp.float64), 0.0)

    return jax.tree.map(blank, stacked), w / jnp.sum(w)


def _mean_log_scale(weights: Weights, log_scale: Float[Array, "silos n_global"]) -> GlobalVec:
    return jnp.log(weights @ jnp.exp(log_scale))


def _report(average: Family, stacked: Family, solution: _Solution | None = None) -> Barycenter:
    family = jax.tree.map(lambda leaf, member: leaf.astype(member.dtype), average, stacked)
    if solution is None:
        residual, iterations = jnp.zeros(()), jnp.zeros((), jnp.int32)
    else:
        residual, iterations = solution.residual, solution.iterations
    return Barycenter(family, residual.astype(family.center.dtype), iterations)
