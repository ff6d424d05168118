"""A fitted formula: coefficients, ratios, sds and silo effects by name."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from .._types import Key
from ..errors import OptionError
from ..results import Fit
from .agreement import Agreement
from .design import Design
from .parsing import SILO
from .priors import correlation_names, sd_name


class GlmmFit:
    """The result of fitting a formula, whether `Glmm.fit`, a deployed run or a file gave it.

    Args:
        agreement: What the silos agreed on.
        fit: The fit of the structured model, for everything else: posteriors, draws, files.
        dropped: How many rows of each silo were left out because of missing values, if that is known.
    """

    def __init__(self, agreement: Agreement, fit: Fit, dropped: Mapping[str, int] | None = None):
        self.design = Design(agreement)
        self.fit = fit
        self.dropped = dict(dropped or {})

    def __repr__(self) -> str:
        return f"<GlmmFit of {self.design.agreement.formula}: {self.fit!r}>"

    def summary(self, *, level: float = 0.95, num_samples: int = 10_000, key: Key | int = 0) -> "GlmmSummary":
        """Tables of the posterior, on the original scale.

        Args:
            level: Of the credible intervals, between quantiles.
            num_samples: Draws behind the tables; a fifth of them for each silo's own effects.
            key: Of the draws.
        """
        if not isinstance(level, float) or not 0 < level < 1:
            raise OptionError(f"level is {level!r}; give a number between 0 and 1.")
        design, quantiles = self.design, ((1 - level) / 2, (1 + level) / 2)
        draws = {name: np.asarray(d, np.float64) for name, d in self.fit.posterior.sample(key, num_samples).items()}
        beta = dict(zip(design.labels, draws["beta"].T, strict=True)) if design.columns else {}
        coefficients = _table(beta, quantiles)
        ratio = design.outcome.ratio
        if ratio is not None:
            medians = [np.quantile(values, [0.5, *quantiles]) for values in beta.values()]
            exponentials = np.exp(np.reshape(medians, (-1, 3)))
            if design.intercept is not None:  # of a level, not of a difference: no ratio
                exponentials[design.intercept] = np.nan
            names = [ratio, *(f"{ratio} {100 * q:g}%" for q in quantiles)]
            coefficients = coefficients.join(pd.DataFrame(exponentials, coefficients.index, names))
        names = [sd_name(effect, block.name) for block in design.blocks for effect in block.effects]
        names += [name for block in design.blocks for name in correlation_names(block.effects, block.name)]
        spread = {name: draws[name] for name in names}
        extra = {design.outcome.extra: draws[design.outcome.extra]} if design.outcome.extra else {}
        return GlmmSummary(
            self,
            coefficients,
            _table(spread, quantiles),
            _table(extra, quantiles),
            self._silos(quantiles, num_samples, key),
        )

    def _silos(self, quantiles, num_samples, key):
        """Effects of the silos themselves, of those whose posteriors are here."""
        blocks = [block for block in self.design.blocks if block.name == SILO]
        found = {}
        for block, name in itertools.product(blocks, self.fit.silo_names):
            drawn = self.fit.silo(name).sample(key, max(1, num_samples // 5))[f"b({SILO})"]
            drawn = np.asarray(drawn, np.float64).reshape(len(drawn), -1)
            found |= {(name, effect): values for effect, values in zip(block.effects, drawn.T, strict=True)}
        table = _table(found, quantiles)
        if found:
            table.index = pd.MultiIndex.from_tuples(list(found), names=["silo", "effect"])
        return table


class GlmmSummary:
    """Tables of a fitted formula; printed, all of them.

    Attributes:
        coefficients: Mean, sd and interval by name; odds or rate ratios too, with a logit or log link: medians and
            intervals of exponentials, but none of the intercept, which is no ratio.
        sds: Of the effects of each grouping factor, and their correlations.
        family: The family's own parameter: `sigma`, or `concentration` (the variance is mean + mean² / concentration).
        silos: Effects of the silos themselves.
        notes: What else should be known.
    """

    def __init__(
        self, fitted: GlmmFit, coefficients: pd.DataFrame, sds: pd.DataFrame, family: pd.DataFrame, silos: pd.DataFrame
    ):
        self.coefficients = coefficients
        self.sds = sds
        self.family = family
        self.silos = silos
        agreed = fitted.design.agreement
        self.notes = [f"{agreed.formula}, {agreed.family} family, {agreed.rows} rows in {len(agreed.silos)} silos"]
        self.notes += left_out(fitted.dropped)

    def __repr__(self) -> str:
        parts = {
            "Coefficients": self.coefficients,
            "Groups": self.sds,
            "Family": self.family,
            "Silos": self.silos,
        }
        shown = [f"{title}:\n{_text(table)}" for title, table in parts.items() if len(table)]
        return "\n".join([*self.notes, *shown])


def left_out(dropped: Mapping[str, int]) -> list[str]:
    """A sentence about rows with missing values; none if there were none."""
    told = ", ".join(f"{count} in {silo}" for silo, count in dropped.items() if count)
    return [f"rows left out because of missing values: {told}"] if told else []


def _text(table):
    return table.to_string(float_format="{:.3f}".format, na_rep="")


def _table(draws: Mapping, quantiles: Sequence[float]) -> pd.DataFrame:
    rows = [[d.mean(), d.std(ddof=1), *np.quantile(d, quantiles)] for d in draws.values()]
    columns = ["mean", "sd", *(f"{100 * q:g}%" for q in quantiles)]
    return pd.DataFrame(rows, index=pd.Index(list(draws), tupleize_cols=False), columns=columns)
