"""Two-stage meta-analysis: what a statistician does today with silos' own results."""

import numpy as np

from ..errors import OptionError


def meta_analysis(means: np.ndarray, sds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    r"""Combine every silo's own posterior by inverse-variance weights, each parameter by itself.

    $$\hat\mu = \frac{\sum_j \mu_j / \sigma_j^2}{\sum_j 1 / \sigma_j^2}, \qquad
      \hat\sigma^2 = \Big( \sum_j 1 / \sigma_j^2 \Big)^{-1}$$

    Args:
        means: $\mu_j$ of each parameter, a row for each silo.
        sds: $\sigma_j$.

    Returns:
        Mean and sd of each parameter.
    """
    means, sds = np.asarray(means, float), np.asarray(sds, float)
    fits = means.ndim == 2 and means.shape == sds.shape and len(means) > 0
    if not fits or not np.isfinite([means, sds]).all() or not (sds > 0).all():
        raise OptionError(
            f"meta_analysis: means of shape {means.shape} and sds of shape {sds.shape}; give a row for each silo, "
            "finite means and positive sds."
        )
    weights = sds**-2
    return (weights * means).sum(0) / weights.sum(0), weights.sum(0) ** -0.5
