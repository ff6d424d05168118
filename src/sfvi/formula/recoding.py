r"""Columns centred and scaled inside, coefficients as written outside: $X T z = X \beta$ with $\beta = T z$.

A column of a design matrix is a product of numeric variables $x_c$ and indicators. Its recoded version has

$$\prod_{c \in C} \frac{x_c - m_c}{s_c} \prod_{c \notin C} \frac{x_c}{s_c}
  = \frac{1}{\prod_c s_c} \sum_{R \subseteq C} (-1)^{|R|} \prod_{c \in R} m_c \prod_{c \notin R} x_c$$

times the indicators, with the agreed means $m_c$ and sds $s_c$. All products on the right must be columns of the design
themselves: $C$ holds the variables for which that is so, given `x1 * x2` all, given `x1:x2` alone none. So the recoded
columns are those of $X T$ with a triangular $T$, and the model is the one written, whatever its terms.
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
        at_means: The columns at the means of all numeric variables, with no indicator: the row that gives the linear
            predictor there.
    """

    matrix: np.ndarray
    sizes: np.ndarray
    at_means: np.ndarray


def recode(columns: Sequence[Column], moments: Callable[[str], Moments], *, standardize: bool) -> Recoding:
    """Find the recoding of a design matrix.

    Args:
        columns: Of the design matrix.
        moments: Of a numeric component.
        standardize: Whether to recode at all; otherwise $T$ is the identity.
    """
    position = {(column.numeric, column.indicators): i for i, column in enumerate(columns)}
    sizes = np.array([np.prod([moments(c).sd for c in column.numeric]) for column in columns])
    matrix = np.eye(len(columns))
    for k, column in enumerate(columns if standardize else ()):
        for left_out in _subsets(_centred(column, position)):
            products = np.prod([-moments(c).mean for c in left_out])
            matrix[position[column.numeric - left_out, column.indicators], k] = products / sizes[k]
    at_means = [0.0 if c.indicators else np.prod([moments(part).mean for part in c.numeric]) for c in columns]
    return Recoding(matrix, sizes, np.array(at_means))


def _centred(column, position):
    """The variables of a column that may be centred: every product without some of them is a column too."""
    able = frozenset(c for c in column.numeric if (column.numeric - {c}, column.indicators) in position)
    complete = all((column.numeric - left_out, column.indicators) in position for left_out in _subsets(able))
    return able if complete else frozenset()


def _subsets(names):
    return [frozenset(some) for size in range(len(names) + 1) for some in itertools.combinations(sorted(names), size)]
