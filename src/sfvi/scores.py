"""How good predictions and posteriors are."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from .errors import OptionError

Floats = npt.NDArray[np.floating]
NUM_LEVELS = 200


def accuracy(probabilities: Floats, labels: npt.ArrayLike) -> float:
    """How often the most probable class is the right one.

    Args:
        probabilities: Of each class, a row for each case.
        labels: The classes, as numbers from 0.
    """
    probabilities, labels = _checked(probabilities, labels)
    return float(np.mean(probabilities.argmax(1) == labels))


def log_score(probabilities: Floats, labels: npt.ArrayLike) -> float:
    r"""Mean log predictive density, $\frac{1}{n} \sum_i \log p(y_i)$; of posterior means, not of draws.

    Args:
        probabilities: Of each class, a row for each case: the mean over draws of the posterior.
        labels: The classes, as numbers from 0.
    """
    probabilities, labels = _checked(probabilities, labels)
    chosen = probabilities[np.arange(len(labels)), labels]
    return float(np.mean(np.log(np.maximum(chosen, np.finfo(np.float32).tiny))))


def calibration_error(probabilities: Floats, labels: npt.ArrayLike, *, num_bins: int = 15) -> float:
    r"""Expected calibration error (Guo et al. 2017): how far confidence and accuracy lie apart.

    $$\sum_b \frac{n_b}{n} \left| \mathrm{accuracy}_b - \mathrm{confidence}_b \right|$$

    Args:
        probabilities: Of each class, a row for each case.
        labels: The classes, as numbers from 0.
        num_bins: Bins $b$ of equal width for the largest probability of a case, its confidence.
    """
    if not isinstance(num_bins, int) or num_bins < 1:
        raise OptionError(f"calibration_error: num_bins is {num_bins!r}; give a whole number of at least 1.")
    probabilities, labels = _checked(probabilities, labels)
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    bins = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    gaps = np.bincount(bins, right - confidence, num_bins)
    return float(np.abs(gaps).sum() / len(labels))


def classification(probabilities: Floats, labels: npt.ArrayLike) -> dict[str, float]:
    """All scores of a classifier, by name."""
    return {
        "accuracy": accuracy(probabilities, labels),
        "log score": log_score(probabilities, labels),
        "ECE": calibration_error(probabilities, labels),
    }


def quantiles(draws: Floats, *, num_levels: int = NUM_LEVELS) -> Floats:
    """Quantiles of every column at the middle of as many parts of [0, 1]: all that pictures and distances need."""
    return np.quantile(draws, (np.arange(num_levels) + 0.5) / num_levels, axis=0)


def wasserstein(one: Floats, other: Floats) -> Floats:
    r"""2-Wasserstein distance of two distributions on the line, from their quantiles.

    $$W_2^2 = \int_0^1 (F^{-1}(u) - G^{-1}(u))^2 \, du$$

    Args:
        one: Quantiles of each column, as `quantiles` gives them.
        other: Those of the other distribution.
    """
    if one.shape != other.shape:
        raise OptionError(f"wasserstein: quantiles of shapes {one.shape} and {other.shape} do not go together.")
    return np.sqrt(np.mean((one - other) ** 2, axis=0))


def mean_and_error(values: npt.ArrayLike) -> tuple[float, float]:
    """Mean of repeated runs and its standard error; that of a single one is not known."""
    values = np.asarray(values, float)
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return float(values.mean()), float(error)


def collected(runs: list[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """`mean_and_error` of every score that all of the runs have."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: mean_and_error([run[name] for run in runs]) for name in names}


def _checked(probabilities, labels):
    probabilities, labels = np.asarray(probabilities, np.float64), np.asarray(labels)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or not len(labels):
        raise OptionError(
            f"Probabilities have shape {probabilities.shape} and labels {labels.shape}; give a row of "
            "probabilities and a label for each case."
        )
    if not np.allclose(probabilities.sum(1), 1.0, atol=1e-4) or probabilities.min() < 0:
        raise OptionError("Probabilities must not be negative and add up to one in every row.")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() >= probabilities.shape[1]:
        raise OptionError(f"Labels must be whole numbers from 0 to {probabilities.shape[1] - 1}.")
    return probabilities, labels
