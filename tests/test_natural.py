"""Gaussian factors in natural parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfvi import families
from sfvi.errors import OptionError
from sfvi.natural import (
    Natural,
    as_gaussian,
    clipped,
    compose,
    gaussian,
    inner_product,
    natural,
    packed,
    root,
    standardized,
    unpacked,
)

from .helpers import assert_trees_close, perturb

BUILDERS = {"mean_field": families.mean_field(), "full": families.full()}
KINDS = pytest.mark.parametrize("kind", BUILDERS)


def make(kind, size, seed, scale=0.7):
    return perturb(BUILDERS[kind](jnp.zeros(size), 0.5), seed, scale)


def covariance(family):
    if isinstance(family, families.FullGaussian):
        return np.asarray(root(family) @ root(family).T)
    return np.diag(np.exp(2 * np.asarray(family.log_scale)))


@KINDS
@settings(max_examples=20)
@given(size=st.integers(1, 6), seed=st.integers(0, 1000))
def test_there_and_back(kind, size, seed):
    family = make(kind, size, seed)
    assert_trees_close(gaussian(natural(family)), family, rtol=1e-8, atol=1e-8)


@KINDS
def test_log_factor_is_the_log_density_up_to_a_constant(kind):
    family = make(kind, 4, 0)
    points = jax.random.normal(jax.random.key(0), (5, 4))
    factor, density = (jax.vmap(f)(points) for f in (natural(family).log_factor, family.log_prob))
    np.testing.assert_allclose(factor - factor[0], density - density[0], rtol=1e-9)


@KINDS
def test_one_half_of_a_matrix_is_sent(kind):
    factor = natural(make(kind, 4, 0))
    assert packed(factor).precision.shape == ((10,) if kind == "full" else (4,))
    assert_trees_close(unpacked(packed(factor), factor), factor)


@KINDS
def test_product_with_a_power(kind):
    """q1 q2^0.3 against numpy, densely."""
    one, two = make(kind, 3, 1), make(kind, 3, 2)
    made = gaussian(natural(one).plus(natural(two), 0.3))
    precisions = [np.linalg.inv(covariance(f)) for f in (one, two)]
    expected = np.linalg.inv(precisions[0] + 0.3 * precisions[1])
    np.testing.assert_allclose(covariance(made), expected, rtol=1e-8, atol=1e-10)
    mean = expected @ (precisions[0] @ one.loc + 0.3 * precisions[1] @ two.loc)
    np.testing.assert_allclose(made.loc, mean, rtol=1e-8)


@KINDS
def test_composition_is_a_change_of_coordinates(kind):
    outer, inner, noise = make(kind, 4, 1), make(kind, 4, 2), jax.random.normal(jax.random.key(1), (4,))
    left = np.asarray(root(outer)) if kind == "full" else np.diag(np.exp(np.asarray(outer.log_scale)))
    np.testing.assert_allclose(compose(outer, inner).sample(noise), outer.loc + left @ inner.sample(noise), rtol=1e-10)


@KINDS
@settings(max_examples=40, deadline=None)
@given(number=st.integers(1, 6), damping=st.floats(0.02, 1.0), seed=st.integers(0, 1000), size=st.integers(1, 4))
def test_clipped_changes_together_leave_a_distribution(kind, number, damping, seed, size):
    """However wild the changes: the precision keeps its share in every direction."""
    base = make(kind, size, seed)
    generator, kept = np.random.default_rng(seed), 0.3
    lowest = jnp.asarray(-(1 - kept) / (number * damping))
    total = natural(base)
    for _ in range(number):
        wild = generator.normal(size=(size, size)) * np.exp(generator.normal(0, 4))
        precision = jnp.asarray(wild + wild.T if kind == "full" else np.diag(wild))
        mean = jnp.asarray(generator.normal(size=size))
        change = clipped(Natural(precision, jnp.zeros(size)), base, mean, lowest)
        following = natural(base).plus(change)
        applied = following.precision @ mean if kind == "full" else following.precision * mean
        np.testing.assert_allclose(applied, following.shift, rtol=1e-6, atol=1e-6 * np.abs(precision).max())
        total = total.plus(change, damping)
    before, after = (
        np.atleast_2d(np.diag(p) if p.ndim == 1 else p) for p in (natural(base).precision, total.precision)
    )
    inverse = np.linalg.cholesky(np.linalg.inv(before))
    assert np.linalg.eigvalsh(inverse.T @ after @ inverse).min() > kept - 1e-6 * np.abs(after).max()


@KINDS
def test_mild_changes_are_not_clipped(kind):
    base, other = make(kind, 3, 1), make(kind, 3, 1, 0.71)
    change = natural(other).plus(natural(base), -1.0)
    assert_trees_close(clipped(change, base, other.loc, jnp.asarray(-0.7)), change, rtol=1e-6, atol=1e-6)


@KINDS
def test_standardized_change_is_the_movement_in_sds(kind):
    """To first order: means in sds, and twice the log sds; their squared length is twice the divergence."""
    base = make(kind, 3, 1)
    inner = perturb(jax.tree.map(jnp.zeros_like, base), 2, 1e-4)
    moved = compose(base, inner)
    change = standardized(natural(moved).plus(natural(base), -1.0), base)
    np.testing.assert_allclose(change.shift, inner.loc, rtol=1e-2, atol=1e-7)
    diagonal = change.precision if kind == "mean_field" else jnp.diagonal(change.precision)
    np.testing.assert_allclose(diagonal, -2 * inner.log_scale, rtol=1e-2, atol=1e-7)
    ratio = np.linalg.solve(covariance(base), covariance(moved))
    shift = np.asarray(moved.loc - base.loc)
    divergence = np.trace(ratio) - 3 - np.log(np.linalg.det(ratio)) + shift @ np.linalg.solve(covariance(base), shift)
    np.testing.assert_allclose(inner_product(change, change), divergence, rtol=2e-2)


def test_other_families_are_refused():
    with pytest.raises(OptionError, match="LowRankGaussian has no natural parameters"):
        as_gaussian(families.low_rank(rank=1)(jnp.zeros(2), 0.1))
