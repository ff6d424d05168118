"""Averages of Gaussians against closed forms, constructed answers, a naive iteration, and what defines them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from sfvi.barycenter import _full, barycenter
from sfvi.errors import OptionError
from sfvi.families import AbstractGlobalFamily, FullGaussian, LowRankGaussian, MeanFieldGaussian
from sfvi.families.triangular import pack, packed_size, unpack

from .helpers import GAUSSIAN_FAMILIES, assert_trees_close, perturb

average = jax.jit(barycenter)
seeds = st.integers(0, 10**6)
few = settings(max_examples=8)


def stack(members):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)


def members_of(stacked):
    leaves, structure = jax.tree.flatten(stacked)
    return [structure.unflatten(member) for member in zip(*leaves, strict=True)]


@jax.jit
def moments(family):
    """Mean and a root of the covariance, read off the sampling map."""
    noise = jnp.zeros(family.noise_size)
    return family.sample(noise), jax.jacfwd(family.sample)(noise)


def covariance(family):
    root = np.asarray(moments(family)[1])
    return root @ root.T


def parts(family):
    """The two parts of a low-rank covariance: sigma and G."""
    sigma = np.exp(family.log_scale)
    return sigma, sigma[:, None] * np.asarray(family.factor)


def rotation(generator, size):
    return np.linalg.qr(generator.normal(size=(size, size)))[0]


def full_from_root(loc, root):
    triangle = np.linalg.qr(root.T, mode="r").T
    scale = np.diag(triangle)
    unit = triangle * np.sign(scale) / np.abs(scale)[:, None]
    return FullGaussian(jnp.asarray(loc), jnp.log(jnp.abs(scale)), pack(jnp.asarray(unit)))


def make_members(kind, seed, *, silos=3):
    """Members that resemble each other as silos do, with weights."""
    generator = np.random.default_rng(seed)
    center = perturb(GAUSSIAN_FAMILIES[kind](jnp.zeros(4), 0.5), seed, 1.0)
    weights = jnp.asarray(generator.dirichlet(np.full(silos, 3.0)))
    return stack([perturb(center, [seed, j]) for j in range(silos)]), weights


def relative_error(root, family):
    """|| S^-1/2 S_hat S^-1/2 - I ||, free of units, S = root root'."""
    whitened = np.linalg.solve(root, moments(family)[1])
    return np.linalg.norm(whitened @ whitened.T - np.eye(len(root)))


def assert_same_distribution(left, right, *, tolerance=1e-10):
    np.testing.assert_allclose(left.loc, right.loc, rtol=0, atol=tolerance)
    assert relative_error(np.linalg.cholesky(covariance(right)), left) < tolerance


def nuclear(matrix):
    return np.sum(np.linalg.svd(matrix, compute_uv=False))


def distance(one, other):
    """Squared 2-Wasserstein distance of two Gaussians."""
    (m, a), (n, b) = moments(one), moments(other)
    return np.sum((m - n) ** 2) + np.sum(a**2) + np.sum(b**2) - 2 * nuclear(a.T @ b)


def distance_by_parts(one, other):
    """What the low-rank average minimizes: the two parts are moved separately."""
    (sigma, g), (tau, h) = parts(one), parts(other)
    diagonal = np.sum((one.loc - other.loc) ** 2) + np.sum((sigma - tau) ** 2)
    return diagonal + np.sum(g**2) + np.sum(h**2) - 2 * nuclear(g.T @ h)


def total(distance_fn, center, stacked, weights):
    return sum(float(w) * distance_fn(center, member) for w, member in zip(weights, members_of(stacked), strict=True))


# Known answers.


@pytest.mark.parametrize("make", [MeanFieldGaussian, lambda loc, s: FullGaussian(loc, s, jnp.zeros(0))])
def test_in_one_dimension_standard_deviations_are_averaged(make):
    locs, sds = jnp.array([1.0, -2.0, 0.5]), jnp.array([0.1, 2.0, 30.0])
    weights = jnp.array([1.0, 2.0, 5.0])
    result = average(stack([make(m[None], jnp.log(s)[None]) for m, s in zip(locs, sds, strict=True)]), weights)
    np.testing.assert_allclose(result.family.loc, [(1.0 - 4.0 + 2.5) / 8], rtol=1e-14)
    np.testing.assert_allclose(np.exp(result.family.log_scale), [(0.1 + 4.0 + 150.0) / 8], rtol=1e-12)


def test_covariances_that_commute_average_by_their_roots():
    generator = np.random.default_rng(0)
    basis, sds = rotation(generator, 5), np.exp(generator.normal(size=(3, 5)) * 3)
    stacked, weights = stack([full_from_root(np.zeros(5), basis * sd) for sd in sds]), jnp.array([0.2, 0.5, 0.3])
    assert relative_error(basis * (weights @ sds), average(stacked, weights).family) < 1e-11


def cholesky(matrix):
    """NumPy's has no extended precision; the inverse of the root comes along."""
    lower, inverse = np.zeros_like(matrix), np.eye(len(matrix), dtype=matrix.dtype)
    for i in range(len(matrix)):
        lower[i, i] = np.sqrt(matrix[i, i] - lower[i, :i] @ lower[i, :i])
        lower[i + 1 :, i] = (matrix[i + 1 :, i] - lower[i + 1 :, :i] @ lower[i, :i]) / lower[i, i]
        inverse[i] = (inverse[i] - lower[i, :i] @ inverse[:i]) / lower[i, i]
    return lower, inverse


def constructed(seed, *, size, silos, shared, apart):
    """Members S_j = T_j S T_j with sum_j w_j T_j = I, so that S is their barycenter; in extended precision.

    S has the condition number `shared`; the maps have about `apart`, so that S_j has up to `shared * apart**2`.
    """
    generator = np.random.default_rng(seed)

    def spread(condition):
        return (rotation(generator, size) * np.geomspace(1.0, condition**-0.5, size)).astype(np.longdouble)

    root, halves = spread(shared), [spread(apart) for _ in range(silos)]
    weights = generator.dirichlet(np.full(silos, 3.0))
    shares = weights.astype(np.longdouble) / np.sum(weights.astype(np.longdouble))
    normalize = cholesky(sum(w * half @ half.T for w, half in zip(shares, halves, strict=True)))[1]
    roots = [(normalize @ half) @ (normalize @ half).T @ root for half in halves]
    members = []
    for triangle, _ in (cholesky(member @ member.T) for member in roots):
        scale = np.diag(triangle)
        unit = jnp.asarray((triangle / scale[:, None]).astype(float))
        members.append(FullGaussian(jnp.zeros(size), jnp.asarray(np.log(scale).astype(float)), pack(unit)))
    condition = max(np.linalg.cond(member.astype(float)) ** 2 for member in roots)
    return stack(members), jnp.asarray(weights), root.astype(float), condition


@pytest.mark.parametrize(("size", "silos"), [(2, 2), (5, 3), (12, 4)])
@pytest.mark.parametrize(("shared", "apart"), [(1, 1.5), (1e3, 2), (1, 30), (1e6, 2), (1e3, 30), (1, 1e3)])
@pytest.mark.parametrize("seed", range(3))
def test_constructed_barycenters_are_found(size, silos, shared, apart, seed):
    stacked, weights, root, condition = constructed(seed, size=size, silos=silos, shared=shared, apart=apart)
    assert condition > 0.1 * max(shared, apart**2)
    result = average(stacked, weights)
    assert relative_error(root, result.family) < 1e-9
    assert result.residual < 1e-12
    assert result.iterations < 100


def naive(covariances, weights):
    """The substitution S <- sum_j w_j (S^1/2 S_j S^1/2)^1/2, in NumPy."""

    def sqrt(matrix):
        values, vectors = np.linalg.eigh(matrix)
        return (vectors * np.sqrt(values)) @ vectors.T

    mean = np.einsum("j,jab->ab", weights, covariances)
    for _ in range(2000):
        root = sqrt(mean)
        mean = sum(w * sqrt(root @ member @ root) for w, member in zip(weights, covariances, strict=True))
    return mean


@pytest.mark.parametrize("seed", range(3))
def test_full_agrees_with_the_naive_iteration_and_solves_the_equation(seed):
    stacked, weights = make_members("full", seed)
    covariances = np.stack([covariance(member) for member in members_of(stacked)])
    family = average(stacked, weights).family
    np.testing.assert_allclose(family.loc, weights @ stacked.loc, rtol=1e-13)
    assert relative_error(np.linalg.cholesky(naive(covariances, np.asarray(weights))), family) < 1e-8
    root = scipy.linalg.sqrtm(covariance(family)).real
    terms = [scipy.linalg.sqrtm(root @ member @ root).real for member in covariances]
    np.testing.assert_allclose(np.einsum("j,jab->ab", weights, terms), root @ root, rtol=0, atol=1e-11)


def test_full_agrees_with_ott():
    """Its `Bures.barycenter` stops after `inner_iterations`, whatever its tolerance: 5 by default, too few."""
    from ott.geometry.costs import Bures, mean_and_cov_to_x

    stacked, weights = make_members("full", 7)
    size = stacked.loc.shape[1]
    points = jnp.stack([mean_and_cov_to_x(m.loc, jnp.asarray(covariance(m)), size) for m in members_of(stacked)])
    precise = {"inner_iterations": 100, "sqrtm_kw": {"threshold": 1e-14, "max_iterations": 1000}}
    found, _ = Bures(size).barycenter(weights, points, tolerance=1e-14, **precise)
    family = average(stacked, weights).family
    np.testing.assert_allclose(family.loc, found[:size], rtol=1e-12)
    theirs = np.asarray(found[size:]).reshape(size, size)
    assert relative_error(np.linalg.cholesky(theirs), family) < 1e-8


# What holds for every family.

each_family = pytest.mark.parametrize("kind", GAUSSIAN_FAMILIES)


@each_family
@few
@given(seed=seeds)
def test_order_splitting_and_absent_members_do_not_matter(kind, seed):
    stacked, weights = make_members(kind, seed)
    expected = average(stacked, 7.0 * weights).family

    def variant(rows, shares):
        chosen, w = jax.tree.map(lambda leaf: leaf[jnp.array(rows)], (stacked, weights))
        return chosen, w * jnp.array(shares)

    assert_same_distribution(average(*variant([2, 0, 1], [1.0, 1.0, 1.0])).family, expected)
    assert_same_distribution(average(*variant([0, 1, 1, 2], [1.0, 0.5, 0.5, 1.0])).family, expected)
    more, shares = variant([0, 1, 2, 2], [1.0, 1.0, 1.0, 0.0])
    broken = jax.tree.map(lambda leaf: leaf.at[3].set(jnp.nan), more)
    assert_same_distribution(average(broken, shares).family, expected)


@each_family
def test_one_member_is_its_own_average(kind):
    stacked, _ = make_members(kind, 3, silos=1)
    result = average(stacked, jnp.array([0.3]))
    assert type(result.family) is type(stacked)
    assert_same_distribution(result.family, members_of(stacked)[0], tolerance=1e-13)
    assert result.residual < 1e-13


@each_family
@few
@given(seed=seeds)
def test_moving_the_members_moves_the_average(kind, seed):
    """Shifts and rotations; for families tied to the axes, shifts and signed permutations."""
    stacked, weights = make_members(kind, seed)
    generator = np.random.default_rng(seed)
    shift = generator.normal(size=4)
    if kind == "full":
        Q = rotation(generator, 4)
        moved = stack([full_from_root(Q @ m + shift, Q @ root) for m, root in map(moments, members_of(stacked))])
    else:
        order, signs = generator.permutation(4), generator.choice([-1.0, 1.0], 4)
        Q = np.eye(4)[order] * signs[order, None]
        loc, log_scale = stacked.loc @ Q.T + shift, stacked.log_scale[:, order]
        leaves = [loc, log_scale, *([Q @ stacked.factor] if kind == "low_rank" else [])]
        moved = jax.tree.unflatten(jax.tree.structure(stacked), leaves)
    before = average(stacked, weights).family
    expected = full_from_root(Q @ before.loc + shift, Q @ np.linalg.cholesky(covariance(before)))
    assert_same_distribution(average(moved, weights).family, expected)


@each_family
@few
@given(seed=seeds)
def test_nothing_nearby_is_closer_to_the_members(kind, seed):
    stacked, weights = make_members(kind, seed)
    best = average(stacked, weights).family
    distance_fn = distance_by_parts if kind == "low_rank" else distance
    reached = total(distance_fn, best, stacked, weights)
    for trial in range(10):
        assert total(distance_fn, perturb(best, [seed, trial], 1e-3), stacked, weights) > reached


@each_family
def test_no_latents_are_averaged_too(kind):
    leaves, structure = jax.tree.flatten(GAUSSIAN_FAMILIES[kind](jnp.ones(2), 1.0))
    empty = structure.unflatten([jnp.zeros((2, 0, *leaf.shape[1:])) for leaf in leaves])
    result = average(empty, jnp.ones(2))
    assert [leaf.shape for leaf in jax.tree.leaves(result.family)] == [(0, *leaf.shape[1:]) for leaf in leaves]


@each_family
def test_a_broken_member_breaks_the_average_without_hanging(kind):
    stacked, weights = make_members(kind, 0)
    result = average(jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), stacked), weights)
    assert np.isnan(np.concatenate([result.family.loc, result.family.log_scale])).all()
    assert result.iterations <= 1


# Low rank.


@few
@given(seed=seeds)
def test_low_rank_parts_are_averaged_one_by_one(seed):
    stacked, weights = make_members("low_rank", seed)
    result = average(stacked, weights)
    sigma, loadings = parts(result.family)
    sigmas, roots = zip(*map(parts, members_of(stacked)), strict=True)
    np.testing.assert_allclose(sigma, weights @ np.stack(sigmas), rtol=1e-12)
    turned = [g @ scipy.linalg.polar(g.T @ loadings)[0] for g in roots]
    np.testing.assert_allclose(np.einsum("j,jab->ab", weights, turned), loadings, rtol=0, atol=1e-10)
    assert result.residual < 1e-12


@few
@given(seed=seeds)
def test_low_rank_bounds_the_barycenter(seed):
    """Its transport is one of many, so it costs more than the best; and its total variance is the smaller."""
    stacked, weights = make_members("low_rank", seed)
    found = average(stacked, weights).family
    dense = stack([full_from_root(m.loc, np.linalg.cholesky(covariance(m))) for m in members_of(stacked)])
    best = average(dense, weights).family
    cost = total(distance, found, stacked, weights)
    assert total(distance_by_parts, found, stacked, weights) > cost > total(distance, best, stacked, weights)
    assert np.trace(covariance(found)) < np.trace(covariance(best))


def test_low_rank_is_exact_for_multiples_of_one_member():
    generator = np.random.default_rng(2)
    base = members_of(make_members("low_rank", 2)[0])[0]
    sizes, weights = jnp.array([0.5, 1.0, 3.0]), jnp.array([0.5, 0.3, 0.2])
    turned = [base.factor @ rotation(generator, 2) for _ in sizes]
    copies = [LowRankGaussian(base.loc, base.log_scale + jnp.log(c), F) for c, F in zip(sizes, turned, strict=True)]
    root = (weights @ sizes) * np.linalg.cholesky(covariance(base))
    assert relative_error(root, average(stack(copies), weights).family) < 1e-11


@pytest.mark.parametrize(("size", "rank", "length"), [(4, 0, 1), (1, 1, 1), (2, 4, 1), (4, 2, 0)])
def test_low_rank_of_any_rank(size, rank, length):
    """Also of length 0, where rotations are undetermined: nothing may become NaN."""
    direction = length * np.random.default_rng(0).normal(size=(size, rank))
    scales, weights = jnp.array([0.5, -1.0, 2.5]), jnp.array([0.5, 0.3, 0.2])
    zeros = jnp.zeros(size)
    found = average(stack([LowRankGaussian(zeros, zeros, scale * direction) for scale in scales]), weights).family
    expected = np.eye(size) + (weights @ jnp.abs(scales)) ** 2 * direction @ direction.T
    np.testing.assert_allclose(covariance(found), expected, rtol=1e-11, atol=1e-11)


# Precision, compilation, refusals.


def in_both_precisions(kind):
    """Members of the same values; of the full family at condition number 1e6, where float32 would show."""
    with jax.enable_x64(True):
        args = constructed(0, size=5, silos=3, shared=1e6, apart=2)[:2] if kind == "full" else make_members(kind, 0)
        single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), args)
        return single, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), single)


@each_family
@pytest.mark.usefixtures("float32")
def test_float32_gets_the_double_answer_rounded(kind):
    single, double = in_both_precisions(kind)
    with jax.enable_x64(True):
        expected = average(*double)
    result = average(*single)
    assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert_trees_close(result.family, expected.family, rtol=3e-7, atol=3e-7)
    assert result.residual < 1e-11


@pytest.mark.usefixtures("float32")
def test_float32_inside_a_compiled_loop():
    """Three rounds that pull the members half way to their average."""

    def body(carry):
        index, members, weights, _ = carry
        result = barycenter(members, weights)
        pulled = jax.tree.map(lambda member, center: 0.5 * (member + center[None]), members, result.family)
        return index + 1, pulled, weights, result.residual

    @jax.jit
    def rounds(members, weights):
        carry = (jnp.zeros((), jnp.int32), members, weights, jnp.zeros((), weights.dtype))
        return jax.lax.while_loop(lambda carry: (carry[0] < 3) & (carry[-1] < 1e-9), body, carry)

    single, double = in_both_precisions("full")
    index, result, _, _ = rounds(*single)
    with jax.enable_x64(True):
        expected = rounds(*double)[1]
    assert (index, result.loc.dtype) == (3, jnp.float32)
    assert_trees_close(jax.tree.leaves(result), jax.tree.leaves(expected), rtol=2e-6, atol=2e-6)


def test_stopped_early_the_residual_tells():
    stacked, weights, root, _ = constructed(0, size=5, silos=3, shared=1, apart=1e3)
    stop_after = jax.jit(lambda count: _full(stacked, weights, max_iterations=count))
    errors = []
    for count in (1, 3, 9):
        result = stop_after(count)
        assert result.iterations == count
        errors.append(relative_error(root, result.family))
        assert result.residual > errors[-1] / 200
    assert errors[0] > errors[1] > errors[2] > 1e-3
    closed = average(*make_members("mean_field", 0))
    assert (closed.residual, closed.iterations) == (0.0, 0)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_pack_inverts_unpack(size):
    packed = jnp.arange(1.0, packed_size(size) + 1.0)
    np.testing.assert_array_equal(jax.jit(lambda entries: pack(unpack(entries, size)))(packed), packed)


class Unknown(AbstractGlobalFamily):
    noise_size = center = sample = log_prob = marginals = None


def test_a_family_without_averages_is_refused():
    sentence = r"the family Unknown cannot be averaged; choose mean_field, .* does not average, such as SFVI\.$"
    with pytest.raises(OptionError, match=sentence):
        barycenter(Unknown(), jnp.ones(2))
