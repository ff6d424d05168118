r"""What silos tell each other before a formula can become the same columns everywhere: no rows, only summaries.

Each silo computes a `Summary` (`glmm_summary`), the server merges them (`agree`), and each silo builds its arrays from
the `Agreement` alone. Means and variances are merged exactly, as Chan, Golub & LeVeque do:

$$n = n_a + n_b, \qquad \delta = m_b - m_a, \qquad m = m_a + \delta \frac{n_b}{n}, \qquad
  S = S_a + S_b + \delta^2 \frac{n_a n_b}{n}$$
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd

from ..errors import DataError, OptionError, first_line
from . import frames, outcomes
from .frames import Table
from .parsing import CATEGORICAL, Parsed, chosen_levels, is_call, measured, parse, values

NUMBER = re.compile(r"[-+]?\d+([.,]\d*)?([eE][-+]?\d+)?")
FEW_LEVELS, MOST_LEVELS = 10, 50  # of a column: fewer may be numbers as text; more must be shared by rows


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of a column."""

    count: int
    mean: float
    squares: float

    @property
    def sd(self) -> float:
        """The standard deviation, with n in the denominator as formulae's `scale` has it."""
        return float(np.sqrt(self.squares / self.count))

    @classmethod
    def of(cls, numbers: np.ndarray) -> "Moments":
        """Of all entries of an array."""
        mean = float(numbers.mean())
        return cls(len(numbers), mean, float(((numbers - mean) ** 2).sum()))

    def merged(self, other: "Moments") -> "Moments":
        """Of both parts together."""
        count, delta = self.count + other.count, other.mean - self.mean
        squares = self.squares + other.squares + delta**2 * self.count * other.count / count
        return Moments(count, self.mean + delta * other.count / count, squares)


@dataclasses.dataclass(frozen=True)
class _Sendable:
    """Plain numbers and texts, which survive JSON."""

    def to_json(self) -> str:
        """As text, to be sent."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From the text that `to_json` made."""
        try:
            return cls._read(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            kind = cls.__name__
            raise DataError(
                f"This is not the text of {'an' if kind[0] in 'AEIOU' else 'a'} {kind}, or not all of it "
                f"({first_line(error)}); send what to_json made."
            ) from error

    @classmethod
    def _read(cls, content: Any) -> Self:
        for name in ("levels", "orders"):
            content[name] = {column: tuple(found) for column, found in content[name].items()}
        content["moments"] = {name: Moments(*numbers) for name, numbers in content["moments"].items()}
        if content["outcome"] is not None:
            content["outcome"] = Moments(*content["outcome"])
        if "silos" in content:
            content["silos"] = tuple(content["silos"])
        return cls(**content)


@dataclasses.dataclass(frozen=True)
class Summary(_Sendable):
    """All that a silo discloses before the fit.

    Attributes:
        formula: As given.
        family: As given.
        rows: How many rows take part.
        dropped: How many were left out because of missing values.
        kinds: Of each column, "numeric" or "categorical".
        moments: Count, mean and sum of squared deviations of each numeric variable or expression of the formula.
        levels: The levels that occur in the silo, of each categorical column.
        orders: The levels in their order, of columns whose categories are ordered.
        outcome: Moments of the outcome, for families whose default priors need its scale (not of 0/1 outcomes).
        level_occurs: Whether the level of outcome['level'] occurs in the silo; None where none was chosen.
    """

    formula: str
    family: str
    rows: int
    dropped: int
    kinds: dict[str, str]
    moments: dict[str, Moments]
    levels: dict[str, tuple]
    orders: dict[str, tuple]
    outcome: Moments | None
    level_occurs: bool | None = None


@dataclasses.dataclass(frozen=True)
class Agreement(_Sendable):
    """What all silos build their arrays from, and the server its default priors.

    Attributes:
        formula: As given.
        family: As given.
        standardize: Whether numeric predictors, and a gaussian outcome, are centred and scaled inside.
        silos: Names of those that agreed.
        rows: Of all silos together.
        kinds: Of each column, "numeric" or "categorical".
        moments: Of each numeric variable or expression, over all silos.
        levels: Of each categorical column, over all silos, in order; the first is the reference.
        orders: Columns whose categories are ordered, with their levels.
        outcome: Moments of the outcome over all silos, where they are needed.
    """

    formula: str
    family: str
    standardize: bool
    silos: tuple[str, ...]
    rows: int
    kinds: dict[str, str]
    moments: dict[str, Moments]
    levels: dict[str, tuple]
    orders: dict[str, tuple]
    outcome: Moments | None

    @property
    def size(self) -> str:
        """How many rows and silos, in words."""
        silos = len(self.silos)
        return f"{self.rows} row{'' if self.rows == 1 else 's'} in {silos} silo{'' if silos == 1 else 's'}"


def glmm_summary(
    frame: pd.DataFrame, formula: str, *, family: str, silo: str = "this silo", missing: str = "error"
) -> Summary:
    """Summarize one silo's rows: the first step, done in the silo.

    Args:
        frame: The silo's rows.
        formula: As in `sfvi.glmm`.
        family: As in `sfvi.glmm`.
        silo: The silo's name, for messages.
        missing: "error", or "drop" for leaving incomplete rows out.
    """
    outcomes.lookup(family)
    parsed = parse(formula)
    return summarize(frames.read(frame, parsed, silo=silo, missing=missing), parsed, family)


def summarize(table: Table, parsed: Parsed, family: str) -> Summary:
    """The summary of rows that have been read."""
    chosen = outcomes.lookup(family)
    outcome, _ = outcomes.observed(chosen, parsed.response, table)
    moments, levels = {}, {}
    for component in parsed.components():
        column = categorical_column(component, table.kinds)
        if column is None:
            part = measured(component)
            moments[name_of(part)] = Moments.of(_finite(values(part, table.frame), component.name, table.silo))
        else:
            levels[column] = frames.levels(table, column)
            _check_levels(levels[column], column, table)
    return Summary(
        parsed.text,
        family,
        len(table.frame),
        table.dropped,
        table.kinds,
        moments,
        levels,
        {column: order for column, order in table.orders.items() if column in levels},
        Moments.of(outcome.astype(float)) if chosen.needs_moments else None,
        bool(outcome.any()) if outcomes.has_level(parsed.response) else None,
    )


def _check_levels(levels, column, table):
    """Refuse numbers that were read as text, and ids: their values would leave the silo as levels."""
    texts = [level for level in levels if isinstance(level, str)]
    numbers = sum(NUMBER.fullmatch(level.strip()) is not None for level in texts)
    if len(levels) > FEW_LEVELS and numbers > 0.9 * len(levels):
        raise DataError(
            f"Silo {table.silo!r}: column {column!r} holds numbers as text, which would leave the silo as levels; "
            "convert it to numbers."
        )
    if len(levels) > MOST_LEVELS and len(levels) > len(table.frame) / 4:
        raise DataError(
            f"Silo {table.silo!r}: column {column!r} has {len(levels)} levels in {len(table.frame)} rows, and levels "
            "leave the silo; group them, or let it be a grouping factor, (1 | group), whose ids stay."
        )


def agree(summaries: Mapping[str, Summary], *, standardize: bool = True) -> Agreement:
    """Merge the silos' summaries: the second step, done at the server.

    Args:
        summaries: By silo name.
        standardize: Whether numeric predictors, and a gaussian outcome, are centred and scaled inside. Coefficients are
            reported on the original scale either way.
    """
    if not isinstance(summaries, Mapping) or not summaries:
        raise DataError("There are no silos; give a mapping from silo name to its data, with at least one silo.")
    for name in summaries:
        if not isinstance(name, str) or not name:
            raise DataError(f"A silo is named {name!r}; names must be non-empty strings.")
    if not isinstance(standardize, bool):
        raise OptionError(f"standardize is {standardize!r}; give True or False.")
    names = sorted(summaries)
    first = summaries[names[0]]
    for name in names[1:]:
        _check_alike(names[0], first, name, summaries[name])
    parts = [summaries[name] for name in names]
    moments = {column: _merged([part.moments[column] for part in parts]) for column in first.moments}
    found = {c: frames.sort_levels(set().union(*(part.levels[c] for part in parts)), c) for c in first.levels}
    agreed = found | {column: order for column, order in first.orders.items() if set(found[column]) <= set(order)}
    _check_variation(parse(first.formula), first.kinds, moments, agreed)
    if first.level_occurs is not None and not any(part.level_occurs for part in parts):
        raise DataError("The chosen level of the outcome occurs in no silo; check how it is written.")
    outcome = None if first.outcome is None else _merged([part.outcome for part in parts])
    if first.family == "gaussian" and outcome is not None and outcome.squares == 0:
        raise DataError("The outcome is the same number in all rows of all silos; there is nothing to fit.")
    rows = sum(part.rows for part in parts)
    return Agreement(
        first.formula,
        first.family,
        standardize,
        tuple(names),
        rows,
        first.kinds,
        moments,
        agreed,
        first.orders,
        outcome,
    )


def categorical_column(component: Any, kinds: Mapping[str, str]) -> str | None:
    """The column whose levels make up a component; None if it is numeric."""
    if is_call(component, *CATEGORICAL):
        return component.call.args[0].name
    return component.name if not hasattr(component, "call") and kinds[component.name] == "categorical" else None


def name_of(part: Any) -> str:
    """By what a part of a formula is known in `moments`."""
    return str(part) if hasattr(part, "eval") else part.name


def _finite(numbers, term, silo):
    try:
        numbers = numbers.astype(float)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"Silo {silo!r}: the term {term} does not give numbers; compute it from numeric columns."
        ) from error
    bad = ~np.isfinite(numbers)
    if bad.any():
        raise DataError(
            f"Silo {silo!r}: the term {term} is not finite in {bad.sum()} of {len(bad)} rows; check the column, or "
            "drop those rows."
        )
    return numbers


def _merged(parts: list[Any]) -> Moments:
    return functools.reduce(Moments.merged, parts)


def _check_alike(left, a: Summary, right, b: Summary):
    if (a.formula, a.family) != (b.formula, b.family):
        raise DataError(
            f"Silo {left!r} summarized {a.formula!r} ({a.family}) and silo {right!r} {b.formula!r} ({b.family}); all "
            "must use one formula and family."
        )
    for column, kind in a.kinds.items():
        if b.kinds[column] != kind:
            raise DataError(
                f"Column {column!r} is {kind} in silo {left!r} and {b.kinds[column]} in silo {right!r}; give it one "
                "type."
            )
    for column in {**a.orders, **b.orders}:
        if a.orders.get(column) != b.orders.get(column):
            raise DataError(
                f"Column {column!r} has ordered categories {a.orders.get(column)} in silo {left!r} and "
                f"{b.orders.get(column)} in silo {right!r}; order them alike."
            )


def _check_variation(parsed, kinds, moments, levels):
    for component in parsed.components():
        column = categorical_column(component, kinds)
        if column is not None and len(levels[column]) < 2:
            raise DataError(f"Column {column!r} has the single level {levels[column][0]!r} in all silos; leave it out.")
        unknown = [level for level in chosen_levels(component) if level not in levels[column]] if column else []
        if unknown:
            known = ", ".join(map(repr, levels[column]))
            raise OptionError(f"{component.name}: no silo has the level {unknown[0]!r}; column {column!r} has {known}.")
        if column is None and not is_call(component, "offset") and moments[name_of(measured(component))].squares == 0:
            raise DataError(f"{component.name} is the same number in all rows of all silos; leave it out.")
