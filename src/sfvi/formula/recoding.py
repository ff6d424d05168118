r"""Columns centred and scaled inside, coefficients as written outside: $X T z = X \beta$ with $\beta = T z$.

A column of a design matrix is a product of numeric variables $x_c$ and indicators. Its recoded version has

$$\prod_{c \in C} \frac{x_c - m_c}{s_c} \prod_{c \notin C} \frac{x_c}{s_c}
  = \frac{1}{\prod_c s_c} \sum_{R \subseteq C} (-1)^{|R|} \prod_{c \in R} m_c \prod_{c \notin R} x_c$$

times the indicators, with the agreed means $m_c$ and sds $s_c$. All products on the right must be columns of the design
themselves: $C$ holds the variables for which that is so, given `x1 * x2` all, given `x1:x2` alone none. Ones may also
be the sum of a factor's indicators, as in `0 + g`. So the recoded columns are those of $X T$ with an invertible $T$,
and the model is the one written, whatever its terms.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .agreement import Moments


class Column(NamedTuple):
    """A column of a design matrix.

    Attributes:
        label: As formulae writes it, "Intercept" for ones.
        numeric: Names of the numeric components in the product.
        indicators: Labels of the categorical ones.
    """

    label: str
    numeric: frozenset[str] = frozenset()
    indicators: frozenset[str] = frozenset()


class Recoding(NamedTuple):
    r"""How inner coefficients become those of the columns as written.

    Attributes:
        matrix: $T$.
        sizes: $\prod_c s_c$ of each column: the unit of 1 / coefficient.
        constant: Coefficients that give 1 in every row, if there are: of the intercept, or of all levels of a factor.
        at_means: For every column without indicators the product of the means of its numeric variables.
    """

    matrix: np.ndarray
    sizes: np.ndarray
    constant: np.ndarray | None
    at_means: np.ndarray


def recode(
    columns: Sequence[Column],
    moments: Callable[[str], Moments],
    *,
    constant: np.ndarray | None,
    standardize: bool,
) -> Recoding:
    """Find the recoding of a design matrix.

    Args:
        columns: Of the design matrix.
        moments: Of a numeric component.
        constant: Coefficients that give 1 in every row, if there are.
        standardize: Whether to recode at all; otherwise $T$ is the identity.
    """
    unit = np.eye(len(columns))
    vectors = {} if constant is None else {(frozenset(), frozenset()): constant}
    vectors |= {(column.numeric, column.indicators): unit[i] for i, column in enumerate(columns)}
    sizes = np.array([np.prod([moments(c).sd for c in column.numeric]) for column in columns])
    matrix = np.zeros_like(unit) if standardize else unit.copy()
    for k, column in enumerate(columns if standardize else ()):
        for left_out in _subsets(_centred(column, vectors)):
            products = np.prod([-moments(c).mean for c in left_out])
            matrix[:, k] += products / sizes[k] * vectors[column.numeric - left_out, column.indicators]
    at_means = [0.0 if c.indicators else np.prod([moments(part).mean for part in c.numeric]) for c in columns]
    return Recoding(matrix, sizes, constant, np.array(at_means))


def _centred(column, vectors):
    """The variables of a column that may be centred: every product without some of them is a column too."""
    able = frozenset(c for c in column.numeric if (column.numeric - {c}, column.indicators) in vectors)
    complete = all((column.numeric - left_out, column.indicators) in vectors for left_out in _subsets(able))
    return able if complete else frozenset()


def _subsets(names):
    return [frozenset(some) for size in range(len(names) + 1) for some in itertools.combinations(sorted(names), size)]
