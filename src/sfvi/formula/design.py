"""A silo's arrays from its rows and the agreement alone.

formulae learns the coding of a formula from a template: an invented table in which all agreed levels occur and whose
numbers mean nothing. Then it codes the silo's own rows in the same way, as it would code new data for prediction.
"""

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..errors import DataError
from . import frames, outcomes
from .agreement import Agreement, Moments, categorical_column, name_of
from .frames import Table
from .parsing import SCALERS, SILO, Parsed, environment, is_call, measured, parse, settle, variables
from .recoding import Column, Recoding, recode


class BlockDesign(NamedTuple):
    """The effects of one grouping factor.

    Attributes:
        name: Of the factor.
        group_columns: That make up a group's id; none for the silo itself.
        terms: formulae's terms, which have learned their coding.
        columns: What has an effect in each group.
        recoding: Of those.
    """

    name: str
    group_columns: tuple[str, ...]
    terms: tuple[Any, ...]
    columns: tuple[Column, ...]
    recoding: Recoding

    @property
    def effects(self) -> list[str]:
        """Names of the effects, "1" for an intercept."""
        return ["1" if column.label == "Intercept" else column.label for column in self.columns]


class Design:
    """How an agreed formula turns rows into arrays.

    Attributes:
        agreement: What was agreed.
        outcome: The family.
        columns: Of the design matrix of the fixed effects.
        recoding: Of those.
        blocks: Grouping factors within silos, and the silo itself if it has effects.
    """

    def __init__(self, agreement: Agreement):
        self.agreement = agreement
        self.outcome = outcomes.lookup(agreement.family)
        self._parsed = _settled(agreement)
        template, env = _template(self._parsed, agreement), environment()
        description = self._parsed.description
        with np.errstate(all="ignore"):
            description.eval(template, env)
            self._terms = [term for term in description.common_terms if term.kind != "offset"]
            self._offsets = [term for term in description.common_terms if term.kind == "offset"]
            self.columns = self._named(self._terms)
            self.recoding = self._recode(self._terms)
            self.blocks = tuple(self._block(block, template, env) for block in self._parsed.blocks)

    @property
    def labels(self) -> list[str]:
        """Names of the coefficients."""
        return [column.label for column in self.columns]

    @property
    def intercept(self) -> int | None:
        """Position of the intercept."""
        return self.labels.index("Intercept") if "Intercept" in self.labels else None

    @property
    def outcome_scale(self) -> tuple[float, float]:
        """What is taken off a gaussian outcome, and by what it is divided."""
        if self.outcome.name != "gaussian" or not self.agreement.standardize or self.agreement.outcome is None:
            return 0.0, 1.0
        moments = self.agreement.outcome
        return (0.0 if self.recoding.constant is None else moments.mean - self.mean_offset), moments.sd

    @property
    def mean_offset(self) -> float:
        """The mean of all offsets together."""
        return sum(self.moments(term.components[0].name).mean for term in self._offsets)

    def read(self, frame: pd.DataFrame, *, silo: str, missing: str = "error") -> Table:
        """The rows of a silo that take part; what was not agreed is refused."""
        return self._checked(frames.read(frame, self._parsed, silo=silo, missing=missing), silo)

    def read_predictors(self, frame: pd.DataFrame, *, silo: str, outcome: bool) -> Table:
        """Rows to predict for, whose outcome is not known; for outcomes of a binomial the trials must be there.

        Rows without a group, where the column or its value is missing, are of a new group each.
        """
        trials = outcome and self.outcome.name == "binomial"
        used = [*self._parsed.components(), *([self._parsed.response.call.args[1]] if trials else [])]
        wanted = {name for part in used for name in variables(part)}
        wanted |= {column for block in self.blocks for column in block.group_columns}
        columns = tuple(column for column in self._parsed.columns if column in wanted)
        parsed = self._parsed._replace(columns=columns)
        computed = {name for part in used for name in variables(part)}
        frame = frames.with_new_groups(frame, [column for column in columns if column not in computed])
        frames.check(frame, parsed, silo)
        incomplete = int(np.asarray(frame[list(columns)].isna()).any(axis=1).sum())
        if incomplete:
            have = "has" if incomplete == 1 else "have"
            raise DataError(f"predict: {incomplete} of {len(frame)} rows {have} missing values; remove or impute them.")
        return self._checked(frames.read(frame, parsed, silo=silo, missing="error"), silo)

    def predictors(self, table: Table) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """On the original scale: offsets, the columns of the fixed effects, and those of each factor's effects."""
        offset = sum((_stack([term], table.frame)[:, 0] for term in self._offsets), np.zeros(len(table.frame)))
        groups = {block.name: _stack(block.terms, table.frame) for block in self.blocks}
        return offset, _stack(self._terms, table.frame), groups

    def trials(self, table: Table) -> np.ndarray | None:
        """The trials of a binomial's rows; None in other families."""
        return outcomes.trials_of(self._parsed.response, table) if self.outcome.name == "binomial" else None

    def _checked(self, table, silo):
        for column, kind in table.kinds.items():
            if kind != self.agreement.kinds[column]:
                raise DataError(
                    f"Silo {silo!r}: column {column!r} is {kind}, but {self.agreement.kinds[column]} was agreed."
                )
        for column, known in self.agreement.levels.items():
            new = [level for level in frames.levels(table, column) if level not in known]
            if new:
                raise DataError(
                    f"Silo {silo!r}: column {column!r} has the level {new[0]!r}, which was not agreed; let all silos "
                    "agree again."
                )
        return table

    def matrix(self, table: Table) -> pd.DataFrame:
        """The design matrix of the fixed effects on the original scale, as formulae has it for pooled rows."""
        return pd.DataFrame(_stack(self._terms, table.frame), columns=pd.Index(self.labels))

    def arrays(self, table: Table) -> dict[str, Any]:
        """What the silo program takes: recoded columns, the outcome, and for each factor every row's group."""
        y, trials = outcomes.observed(self.outcome, self._parsed.response, table)
        offset = sum((_stack([term], table.frame)[:, 0] for term in self._offsets), np.zeros(len(table.frame)))
        if self.outcome.name == "gaussian":
            shift, scale = self.outcome_scale
            y, offset = (y - offset - shift) / scale, np.zeros(len(y))
        data: dict[str, Any] = {"y": y}
        if self.columns:
            data["x"] = _stack(self._terms, table.frame) @ self.recoding.matrix
        if self._offsets and self.outcome.name != "gaussian":
            data["offset"] = offset
        if trials is not None:
            data["trials"] = trials
        for block in self.blocks:
            entry = {"z": _stack(block.terms, table.frame) @ block.recoding.matrix}
            if block.name != SILO:
                ids, entry["row"] = self.groups(table, block)
                entry["ones"] = np.ones(len(ids))
            data[f"group {block.name}"] = entry
        return data

    def groups(self, table: Table, block: BlockDesign) -> tuple[list, np.ndarray]:
        """A silo's groups in order, and the number of each row's group."""
        return frames.group_ids(table, block.group_columns)

    def moments(self, component: str) -> Moments:
        """Of a numeric component of the formula, from what was agreed."""
        return self._moments[component]

    @functools.cached_property
    def _moments(self) -> dict[str, Moments]:
        found = {}
        for component in self._parsed.components():
            if categorical_column(component, self.agreement.kinds) is None:
                raw = self.agreement.moments[name_of(measured(component))]
                if is_call(component, *SCALERS):
                    unit = 1.0 if is_call(component, "center") else raw.sd
                    raw = Moments(raw.count, 0.0, raw.squares / unit**2)
                found[component.name] = raw
        return found

    def _recode(self, terms):
        columns = self._named(terms)
        return recode(columns, self.moments, constant=self._constant(terms), standardize=self.agreement.standardize)

    def _constant(self, terms):
        """Coefficients that add up to 1 in every row: of the intercept, or of a factor that has all its levels."""
        widths = [len(self._of_term(term)) for term in terms]
        for number, (term, width) in enumerate(zip(terms, widths, strict=True)):
            matrix = np.asarray(term.data, float).reshape(-1, width)
            if not any(column.numeric for column in self._of_term(term)) and np.all(matrix.sum(axis=1) == 1):
                return np.repeat(np.arange(len(terms)) == number, widths).astype(float)
        return None

    def _named(self, terms):
        """The columns of terms, in formulae's order."""
        return tuple(column for term in terms for column in self._of_term(term))

    def _of_term(self, term):
        if term.kind == "intercept":
            return [Column("Intercept")]
        parts = [[(component.name, label) for label in component.labels] for component in term.components]
        columns = []
        for choice, label in zip(itertools.product(*parts), term.labels, strict=True):
            numeric = frozenset(name for name, _ in choice if name in self._moments)
            columns.append(Column(label, numeric, frozenset(part for name, part in choice if name not in numeric)))
        return columns

    def _block(self, block, template, env):
        has_intercept = any(term.kind == "intercept" for term in block.terms)
        for term in block.terms:
            term.set_type(template, env)
            term.set_data(not has_intercept)
        columns = self._named(block.terms)
        return BlockDesign(block.name, block.columns, block.terms, columns, self._recode(block.terms))


def _settled(agreement: Agreement) -> Parsed:
    """The formula, its scalers told the agreed means and sds."""
    parsed = parse(agreement.formula)
    for component in parsed.components():
        if is_call(component, *SCALERS):
            moments = agreement.moments[name_of(measured(component))]
            settle(component, moments.mean, moments.sd)
    return parsed


def _template(parsed, agreement):
    size = max([2, *map(len, agreement.levels.values())])
    columns = {}
    for column, kind in agreement.kinds.items():
        if column in agreement.levels:
            found = list(itertools.islice(itertools.cycle(agreement.levels[column]), size))
            numbers = kind == "numeric"
            columns[column] = pd.Series(found, dtype=float if numbers else object)
            if column in agreement.orders:
                columns[column] = pd.Categorical(found, categories=list(agreement.levels[column]), ordered=True)
            elif numbers and all(isinstance(level, int) for level in agreement.levels[column]):
                columns[column] = pd.Series(found, dtype=int)
        else:
            columns[column] = np.ones(size) if kind == "numeric" else pd.Series([""] * size, dtype=object)
    return pd.DataFrame(columns, index=pd.RangeIndex(size))


def _stack(terms, frame):
    """The columns of terms for new rows, as floats."""
    with np.errstate(all="ignore"):
        parts = [np.asarray(term.eval_new_data(frame), float).reshape(len(frame), -1) for term in terms]
    return np.concatenate(parts, axis=1) if parts else np.zeros((len(frame), 0))
