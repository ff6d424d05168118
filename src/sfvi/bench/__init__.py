"""Speed on this machine, as ratios of things measured side by side: `sfvi bench`."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from .step import MERGED, Comparison, Effort, compare

__all__ = ["FULL", "QUICK", "Speed", "measure"]

FULL = Effort(repetitions=10, steps=2000)
QUICK = Effort(repetitions=3, steps=200)  # too few steps to say where everyone ends


class Speed(NamedTuple):
    """What was measured.

    Attributes:
        table: For each contestant rounds per second, and how many times as long as it SFVI takes, by the fastest
            repetition and by the median one.
        agree: Whether all ended at the same ELBO, so that they did the same work; None after too few steps.
    """

    table: pd.DataFrame
    agree: bool | None

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        names = ["rounds_per_second", "rounds_per_second_median", "time_ratio", "time_ratio_median"]
        rows = {name: dict(zip(names, row, strict=True)) for name, *row in self.table.itertuples()}
        return {"contestants": rows, "agree": self.agree}


def measure(*, quick: bool = False) -> Speed:
    """Compare SFVI on six cities over two silos with a hand-written JAX loop and `numpyro.infer.SVI` on pooled data.

    Args:
        quick: Seconds instead of half a minute; the ratios are noisier.
    """
    (found,) = compare(QUICK if quick else FULL, numbers=(2,), stacked=False)
    return Speed(_table(found), None if quick else found.agree())


def _table(found: Comparison) -> pd.DataFrame:
    rows = {
        name: [
            1 / float(np.min(outcome.seconds)),
            1 / float(np.median(outcome.seconds)),
            found.ratio(MERGED, name, np.min),
            found.ratio(MERGED, name, np.median),
        ]
        for name, outcome in found.outcomes.items()
    }
    columns = ["rounds/s, best", "rounds/s, median", "time of SFVI / its, best", "median"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)
