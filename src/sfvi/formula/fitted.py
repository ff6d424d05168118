"""A fitted formula: coefficients, ratios, sds and silo effects by name."""

import copy
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import pandas as pd

from .._types import Key
from ..diagnostics import Diagnosis
from ..errors import OptionError
from ..posterior import SiloPosterior
from ..results import Fit
from .agreement import Agreement
from .design import Design
from .parsing import SILO
from .predicting import Groups, check_kind, linear_predictor, outcome_draws, tabulate
from .priors import correlation_names, sd_name

UNSAID = ""  # no silo has this name


class GlmmFit:
    """The result of fitting a formula, whether `Glmm.fit`, a deployed run or a file gave it.

    Args:
        agreement: What the silos agreed on.
        fit: The fit of the structured model, for everything else: posteriors, draws, files.
        dropped: How many rows of each silo were left out because of missing values, if that is known.
        groups: For each silo that is here and each grouping factor the ids of its groups, as `glmm_groups` gives them.
            They name effects in the silo's own summaries, find them again for predictions, and stay in the silo.
    """

    def __init__(
        self,
        agreement: Agreement,
        fit: Fit,
        dropped: Mapping[str, int] | None = None,
        groups: Mapping[str, Groups] | None = None,
    ):
        self.design = Design(agreement)
        self.fit = fit
        self.dropped = dict(dropped or {})
        self._groups = dict(groups or {})
        for name, found in self._groups.items():
            if name in fit.silo_names:
                name_groups(fit.silo(name), found)

    def __repr__(self) -> str:
        return f"<GlmmFit of {self.design.agreement.formula}: {self.fit!r}>"

    def diagnose(self, *, key: Key | int = 0, num_samples: int = 1000, num_draws: int = 64) -> Diagnosis:
        """Can this posterior be believed? See `Fit.diagnose`."""
        return self.fit.diagnose(key=key, num_samples=num_samples, num_draws=num_draws)

    def report(self, path: str | os.PathLike, *, diagnosis: Diagnosis | Literal[False] | None = None) -> None:
        """Write the server's report, see `Fit.report`."""
        self.fit.report(path, diagnosis=diagnosis)

    def save(self, folder: str | os.PathLike) -> None:
        """Write the fit, see `Fit.save`; `Glmm.load` of the same formula and silos reads it."""
        self.fit.save(folder)

    def summary(self, *, level: float = 0.95, num_samples: int = 10_000, key: Key | int = 0) -> "GlmmSummary":
        """Tables of the posterior, on the original scale.

        Args:
            level: Of the credible intervals, between quantiles.
            num_samples: Draws behind the tables; a fifth of them for each silo's own effects.
            key: Of the draws.
        """
        _check_level(level)
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

    def predict(
        self,
        rows: pd.DataFrame,
        *,
        silo: str | None = UNSAID,
        kind: str = "mean",
        level: float = 0.95,
        num_samples: int = 1000,
        key: Key | int = 0,
    ) -> pd.DataFrame:
        """Predict for new rows: mean, sd and interval of each, by draws of all that is uncertain.

        Groups that the silo did not have, and all effects of a silo that took no part, are drawn from the population;
        rows of one new group share its effects. So a new patient needs no id: where the column of a grouping factor, or
        a row's value in it, is missing, the row is of a new group, its prediction an average over the population.

        Args:
            rows: With the columns of the formula's right side, complete but for grouping factors; the outcome is not
                needed.
            silo: The silo that the rows belong to, whose posterior must be here; None for one that took no part.
            kind: "mean" for the outcome's mean, of a binomial the probability; "outcome" for new outcomes.
            level: Of the intervals, between quantiles.
            num_samples: Draws.
            key: Of the draws.
        """
        _check_level(level)
        check_kind(kind, num_samples)
        if silo == UNSAID:
            there = ", ".join(map(repr, self.fit.silo_names)) or "none is here"
            raise OptionError(
                f"predict: say to which silo the rows belong, silo=NAME ({there}); or silo=None for one that took no "
                "part."
            )
        table = self.design.read_predictors(rows, silo=silo or "new", outcome=kind == "outcome")
        posterior = self.fit.posterior if silo is None else self.fit.silo(silo)
        groups = {} if silo is None else self._groups_of(silo)
        eta, drawn = linear_predictor(self.design, table, posterior, groups, num_samples=num_samples, key=key)
        return tabulate(outcome_draws(self.design, table, eta, drawn, kind, key), level, rows.index)

    def _groups_of(self, silo):
        within = [block.name for block in self.design.blocks if block.name != SILO]
        if within and silo not in self._groups:
            raise OptionError(
                f"predict: which effects belong to which groups of silo {silo!r} is not known here; give GlmmFit "
                "groups=, from sfvi.formula.glmm_groups."
            )
        return {SILO: [SILO], **self._groups.get(silo, {})}

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
        self.notes = [f"{agreed.formula}, {agreed.family} family, {agreed.size}"]
        self.notes += left_out(fitted.dropped)

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """What is global, by title; tables without rows are left out."""
        parts = {"Coefficients": self.coefficients, "Groups": self.sds, "Family": self.family}
        return {title: table for title, table in parts.items() if len(table)}

    def __repr__(self) -> str:
        parts = self.tables | ({"Silos": self.silos} if len(self.silos) else {})
        shown = [f"{title}:\n{_text(table)}" for title, table in parts.items()]
        return "\n".join([*self.notes, *shown])


def name_groups(silo: SiloPosterior, groups: Groups) -> None:
    """Have a silo's own summaries, ArviZ data and report call its groups by their ids, which are in no file.

    Args:
        silo: The silo's posterior.
        groups: Ids of its groups, by factor.
    """
    model, shared = copy.copy(silo.shared.model), copy.copy(silo.shared)
    ids = {f"groups({factor})": [_label(group) for group in found] for factor, found in groups.items()}
    model.coords, shared.model = {**model.coords, **ids}, model
    silo.shared = shared  # labels only, and only here: the global posterior has none of them


def _label(group):
    return ":".join(map(str, group)) if isinstance(group, tuple) else group


def _check_level(level):
    if not isinstance(level, float) or not 0 < level < 1:
        raise OptionError(f"level is {level!r}; give a number between 0 and 1.")


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
