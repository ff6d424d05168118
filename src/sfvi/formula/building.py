"""The front door of formulas: `sfvi.glmm`."""

import os
from collections.abc import Mapping
from typing import Any

import pandas as pd

from .. import fitting, results
from .._types import Key
from ..algorithms import AlgorithmOptions
from ..errors import DataError, OptionError
from ..model import StructuredModel
from . import agreement as agreeing
from . import frames, outcomes, priors, programs
from .agreement import Agreement
from .design import Design
from .fitted import GlmmFit, left_out
from .parsing import SILO, parse
from .priors import Prior


class Glmm:
    """A mixed model by formula: two NumPyro programs, and the silos' arrays for them.

    Attributes:
        agreement: What the silos agreed on.
        design: How rows become arrays.
        model: The structured model.
        silos: The arrays of each silo.
        groups: For each silo and grouping factor the ids of its groups, in the order of their effects.
        dropped: How many rows of each silo were left out because of missing values.
    """

    def __init__(
        self,
        agreement: Agreement,
        tables: Mapping[str, frames.Table],
        given: Mapping[str, Prior] | None = None,
    ):
        self.agreement = agreement
        self.design = Design(agreement)
        self._priors = priors.settle(self.design, given)
        self._tables = dict(tables)
        self._given = dict(given or {})
        self.model: StructuredModel = programs.build(self.design, self._priors)
        self.silos = {name: self.design.arrays(table) for name, table in self._tables.items()}
        self.groups = {name: _groups(self.design, table) for name, table in self._tables.items()}
        self.dropped = {name: table.dropped for name, table in self._tables.items()}

    @property
    def priors(self) -> pd.DataFrame:
        """The priors in use, by name; `priors=` of `sfvi.glmm`, or `with_priors`, changes them."""
        return self._priors.table()

    def with_priors(self, given: Mapping[str, Prior]) -> "Glmm":
        """The same model with some priors changed.

        Args:
            given: Priors by name.
        """
        return Glmm(self.agreement, self._tables, {**self._given, **given})

    def matrix(self, silo: str) -> pd.DataFrame:
        """A silo's design matrix of the fixed effects, on the original scale."""
        if silo not in self._tables:
            raise OptionError(f"There is no silo {silo!r}; there are {', '.join(map(repr, self._tables))}.")
        return self.design.matrix(self._tables[silo])

    def fit(
        self,
        *,
        key: Key | int = 0,
        algorithm: AlgorithmOptions | None = None,
        num_rounds: int | None = None,
        **options: Any,
    ) -> GlmmFit:
        """Fit the model to the silos, on this machine, in this process.

        Args:
            key: Of all randomness.
            algorithm: As in `sfvi.fit`.
            num_rounds: As in `sfvi.fit`.
            **options: Others of `sfvi.fit`.
        """
        found = fitting.fit(self.model, self.silos, key=key, algorithm=algorithm, num_rounds=num_rounds, **options)
        return GlmmFit(self.agreement, found, self.dropped, self.groups)

    def load(self, folder: str | os.PathLike) -> GlmmFit:
        """Read what `GlmmFit.save` or `sfvi fit --formula` wrote, of the same formula, priors and silos.

        Args:
            folder: Where it is.
        """
        return GlmmFit(self.agreement, results.load(folder, self.model, self.silos), self.dropped, self.groups)

    def __repr__(self) -> str:
        agreed = self.agreement
        lines = [f"Glmm: {agreed.formula}, {agreed.family} family ({self.design.outcome.link} link)"]
        lines.append(f"{agreed.size}")
        lines += left_out(self.dropped)
        for block in self.design.blocks:
            if block.name != SILO:
                counts = ", ".join(f"{len(groups[block.name])} in {silo}" for silo, groups in self.groups.items())
                lines.append(f"{block.name}: {counts}")
        for column, levels in agreed.levels.items():
            lines.append(f"{column}: levels {', '.join(map(str, levels))}")
        return "\n".join([*lines, "Priors:", self.priors.to_string()])


def glmm(
    formula: str,
    *,
    family: str,
    silos: Mapping[str, pd.DataFrame],
    priors: Mapping[str, Prior] | None = None,
    standardize: bool = True,
    missing: str = "error",
) -> Glmm:
    """A generalized linear mixed model over silos, by formula.

    The three steps of a deployment in one process: each silo summarizes its rows (`glmm_summary`), the summaries are
    merged (`agree`), and each silo builds its arrays from the agreement.

    Args:
        formula: Like `wheeze ~ smoke * age + (1 | child)`, as the package formulae reads it. `(1 + x | group)` are
            effects of groups within silos, correlated; in `(1 | silo)` the name `silo` stands for the silo itself.
        family: "gaussian", "bernoulli", "binomial" (with `prop(successes, trials)` on the left), "poisson" or
            "negativebinomial".
        silos: A data frame by silo name, one row an observation.
        priors: Priors by name, in the place of the defaults: of coefficients, `sd(1|group)`, `cor(group)` (a number,
            the concentration of LKJ), `sigma` and `concentration`.
        standardize: Whether numeric predictors, and a gaussian outcome, are centred and scaled inside. Coefficients are
            reported on the original scale either way.
        missing: "error", or "drop" for leaving incomplete rows out.
    """
    if not isinstance(silos, Mapping) or not silos:
        raise DataError("silos must be a mapping from silo name to data frame, with at least one silo.")
    outcomes.lookup(family)
    parsed = parse(formula)
    tables = {name: frames.read(frame, parsed, silo=name, missing=missing) for name, frame in silos.items()}
    summaries = {name: agreeing.summarize(table, parsed, family) for name, table in tables.items()}
    return Glmm(agreeing.agree(summaries, standardize=standardize), tables, priors)


def glmm_arrays(
    frame: pd.DataFrame, agreement: Agreement, *, silo: str = "this silo", missing: str = "error"
) -> dict[str, Any]:
    """Build one silo's arrays from its rows and the agreement: the third step, done in the silo.

    Args:
        frame: The silo's rows.
        agreement: What was agreed.
        silo: The silo's name, for messages.
        missing: "error", or "drop" for leaving incomplete rows out.
    """
    design = Design(agreement)
    return design.arrays(design.read(frame, silo=silo, missing=missing))


def glmm_groups(
    frame: pd.DataFrame, agreement: Agreement, *, silo: str = "this silo", missing: str = "error"
) -> dict[str, list]:
    """Ids of one silo's groups by grouping factor, in the order of their effects; they are the silo's own.

    Args:
        frame: The silo's rows.
        agreement: What was agreed.
        silo: The silo's name, for messages.
        missing: As in `glmm_arrays`.
    """
    design = Design(agreement)
    return _groups(design, design.read(frame, silo=silo, missing=missing))


def _groups(design, table):
    return {block.name: design.groups(table, block)[0] for block in design.blocks if block.name != SILO}


def glmm_model(agreement: Agreement, *, priors: Mapping[str, Prior] | None = None) -> StructuredModel:
    """The structured model of an agreement, for the server and every silo of a deployed run.

    Args:
        agreement: What was agreed.
        priors: As in `glmm`.
    """
    return Glmm(agreement, {}, priors).model
