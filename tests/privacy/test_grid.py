"""Whole numbers under differential privacy: exact sums, a discrete Gaussian, and no last digits that tell of data."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

import sfvi
from sfvi.algorithms.grid import FARTHEST, LEVELS, SPREAD, STEP, WIDTH, Grid, Whole, discrete_gaussian, thresholds
from sfvi.algorithms.privacy import noisy, summand

PRIVATE = sfvi.UnitPrivacy(clip=0.7, noise_multiplier=3.0)
GAMMA = 0.7 * 3.0 / SPREAD


def weights(spread, farthest):
    z = np.arange(-farthest, farthest + 1)
    found = np.exp(-0.5 * (z / spread) ** 2)
    return found / found.sum()


def whole(values):
    """As Python's own numbers, which have no end."""
    return [int(h) * 2**16 + int(low) for h, low in zip(*map(np.ravel, values), strict=True)]


def test_thresholds_are_those_of_a_discrete_gaussian():
    upper, lower = thresholds()
    found = np.array([(int(u) << 32) + int(v) for u, v in zip(upper, lower, strict=True)], dtype=object)
    assert list(found[2 * FARTHEST :]) == [2**64 - 1] * (len(found) - 2 * FARTHEST)
    exact = found[: 2 * FARTHEST]
    assert max(abs(a + b - 2**64) for a, b in zip(exact, exact[::-1], strict=True)) <= 1  # symmetric
    mass = np.diff([0, *exact, 2**64]).astype(float) / 2.0**64
    np.testing.assert_allclose(mass, weights(WIDTH, FARTHEST), atol=1e-17)


def test_two_of_them_make_another():
    """Z_0 + m Z_1 has the probabilities of a discrete Gaussian, up to the rounding of this computation."""
    one = weights(WIDTH, FARTHEST)
    spaced = np.zeros(STEP * 2 * FARTHEST + 1)
    spaced[::STEP] = one
    found = np.convolve(spaced, one)
    spread = WIDTH * math.hypot(1, STEP)
    expected = weights(spread, len(found) // 2)
    center = slice(len(found) // 2 - int(6 * spread), len(found) // 2 + int(6 * spread))
    np.testing.assert_allclose(found[center], expected[center], rtol=1e-12)


def test_draws_are_of_that_distribution(float32):
    """Size, shape, tails, and the last bits, in single precision; the same compiled, mapped or neither."""
    keys = jax.random.split(jax.random.key(0), 4)
    found = np.asarray(jax.jit(jax.vmap(lambda key: discrete_gaussian(key, (50_000,))))(keys))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found[2], discrete_gaussian(keys[2], (50_000,)))
    draws = found.ravel()
    assert abs(draws.std() / SPREAD - 1) < 4 / math.sqrt(2 * len(draws))
    assert stats.kstest(draws / SPREAD, "norm").pvalue > 1e-3
    for level in range(LEVELS):  # no digit is rarer than others
        assert stats.chisquare(np.bincount(draws // STEP**level % STEP)).pvalue > 1e-4 or level == LEVELS - 1


@given(vector=arrays(float, 5, elements=st.floats(-1e6, 1e6)), noise=st.sampled_from([0.01, 3.0, 1e6]))
def test_a_summand_is_near_the_shortened_vector_and_not_longer_than_the_clip(vector, noise):
    privacy = sfvi.UnitPrivacy(clip=0.7, noise_multiplier=noise)
    step = noise * 0.7 / SPREAD
    found = np.array(whole(summand(privacy, jnp.asarray(vector))), float) * step
    assert np.linalg.norm(found) <= 0.7
    short = vector * min(1.0, 0.7 / max(np.linalg.norm(vector), 1e-300))
    assert np.all(np.abs(found - short) <= step * (1 + 1e-9) + 1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_what_is_not_finite_adds_nothing(bad):
    """One number of a unit that broke, or of which the norm cannot be told: the whole unit is left out."""
    with jax.debug_nans(False):
        found = summand(PRIVATE, jnp.array([1.0, bad, 0.1]))
    assert whole(found) == [0, 0, 0]


def test_sums_are_exact_however_many_there_are():
    generator = np.random.default_rng(0)
    numbers = generator.integers(-(2**31), 2**31, size=(40, 1000, 2), dtype=np.int32)
    total = Whole(jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32))
    for some in numbers:
        parts = Whole.of(jnp.asarray(some))
        total = total.plus(Whole(parts.high.sum(0, dtype=jnp.int32), parts.low.sum(0, dtype=jnp.int32)))
    assert whole(total) == [int(n) for n in numbers.astype(object).sum((0, 1))]


def test_the_last_digits_of_a_release_tell_nothing():
    """Of whatever vector, all releases lie on one grid, and vectors that round to the same have the same ones.

    With noise in floating point, the remainders tell the vectors apart from a single release.
    """
    key = jax.random.key(1)
    secrets = [jnp.array([0.1, 0.2]), jnp.array([0.1 + GAMMA / 8, 0.2]), jnp.array([-0.3, 1e-9])]
    releases = [np.asarray(noisy(PRIVATE, key, summand(PRIVATE, vector), jnp.dtype(float))) for vector in secrets]
    for release in releases:
        np.testing.assert_allclose(release / GAMMA, np.rint(release / GAMMA), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(releases[0], releases[1])
    assert (releases[0] != releases[2]).all()
    plain = [np.asarray(vector + 2.1 * jax.random.normal(key, (2,))) / GAMMA for vector in secrets]
    assert all(np.abs(release - np.rint(release)).max() > 1e-3 for release in plain)


def test_in_single_precision_a_release_is_a_function_of_the_same_whole_numbers(float32):
    grid, total = Grid(GAMMA, 0.7), Whole.of(jnp.array([123_456_789, -5], jnp.int32))
    single = grid.noisy(jax.random.key(0), total, jnp.dtype("float32"))
    exact = np.array(whole(total)) + np.asarray(discrete_gaussian(jax.random.key(0), (2,)))
    np.testing.assert_allclose(single, exact * GAMMA, rtol=1e-6)
