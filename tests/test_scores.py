"""Scores against cases worked out by hand, and distances against closed forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import sfvi
from sfvi import scores

SURE = np.array([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
LABELS = np.array([0, 1, 1, 1])


def test_a_case_by_hand():
    """Bins of a tenth: two cases at 0.9 of which one is right, one each at 0.8 and 0.6, both right."""
    assert scores.accuracy(SURE, LABELS) == 0.75
    assert scores.log_score(SURE, LABELS) == pytest.approx(np.mean(np.log([0.9, 0.1, 0.8, 0.6])))
    expected = (2 * abs(0.5 - 0.9) + (1 - 0.8) + (1 - 0.6)) / 4
    assert scores.calibration_error(SURE, LABELS, num_bins=10) == pytest.approx(expected)
    assert set(scores.classification(SURE, LABELS)) == {"accuracy", "log score", "ECE"}


def test_calibrated_probabilities_have_no_calibration_error():
    """Labels drawn from the probabilities themselves; four standard errors of 15 bins."""
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.ones(3), 200_000)
    labels = (probabilities.cumsum(1) < generator.random((200_000, 1))).sum(1)
    assert scores.calibration_error(probabilities, labels) < 4 * 0.5 * np.sqrt(15 / 200_000)
    sharper = probabilities**3 / (probabilities**3).sum(1, keepdims=True)
    assert scores.calibration_error(sharper, labels) > 0.1


def test_a_certain_error_is_not_infinite():
    assert np.isfinite(scores.log_score(np.array([[1.0, 0.0]]), [1]))


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(0.1, 3), st.floats(0.1, 3))
def test_the_distance_of_gaussians(first, second, sd, other):
    """W2^2 = (m - m')^2 + (s - s')^2; half a percent of the sds for tails beyond the last level."""
    levels = (np.arange(2000) + 0.5) / 2000
    one, two = (stats.norm.ppf(levels, m, s)[:, None] for m, s in ((first, sd), (second, other)))
    found = scores.wasserstein(one, two)[0]
    assert found == pytest.approx(np.hypot(first - second, sd - other), abs=0.005 * (sd + other))


def test_quantiles_of_draws():
    draws = np.random.default_rng(0).permutation(np.arange(1000.0))[:, None] * np.array([1.0, -2.0])
    found = scores.quantiles(draws, num_levels=10)
    np.testing.assert_allclose(found[:, 0], 999 * (np.arange(10) + 0.5) / 10)
    np.testing.assert_allclose(found[:, 1], -2 * found[::-1, 0])


def test_means_of_runs():
    runs = [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.0}, {"a": 5.0}]
    assert scores.collected(runs) == {"a": (3.0, pytest.approx(2 / np.sqrt(3)))}
    mean, error = scores.mean_and_error([4.0])
    assert mean == 4.0
    assert np.isnan(error)


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (SURE, [0, 1], r"shape \(4, 2\) and labels \(2,\)"),
        (SURE, [0, 1, 2, 0], "from 0 to 1"),
        (SURE, [0.0, 1.0, 0.0, 1.0], "whole numbers"),
        (2 * SURE, LABELS, "add up to one"),
        (SURE * [[2, -1]] + [[-0.9, 0.0]], LABELS, "not be negative"),
        (np.full((4, 2), np.nan), LABELS, "add up to one"),
    ],
)
def test_what_cannot_be_scored_is_refused(probabilities, labels, message):
    with pytest.raises(sfvi.OptionError, match=message):
        scores.accuracy(probabilities, labels)
