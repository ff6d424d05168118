"""The data sets, how they are split, and what each split must reach."""

from typing import NamedTuple

import numpy as np

from sfvi.data import six_cities, split_units
from sfvi.model import StructuredModel
from sfvi.zoo import (
    linear_mixed_model,
    logistic_mixed_model,
    poisson_mixed_model,
    simulate_linear_mixed,
    simulate_poisson_mixed,
)


class Problem(NamedTuple):
    """A model and all its data."""

    model: StructuredModel
    data: dict[str, np.ndarray]


class Split(NamedTuple):
    """A problem over silos, and the rounds that Sites has."""

    problem: str
    silos: dict[str, dict[str, np.ndarray]]
    num_rounds: int


def problems() -> dict[str, Problem]:
    """By name."""
    return {
        "six cities": Problem(logistic_mixed_model(), six_cities()),
        "Poisson": Problem(poisson_mixed_model(), simulate_poisson_mixed(200)),
        "linear": Problem(linear_mixed_model(), simulate_linear_mixed(200)),
    }


def splits() -> dict[str, Split]:
    """By name."""
    known = problems()
    cities = known["six cities"].data
    by_outcome = np.array_split(np.argsort(cities["y"].sum(1), kind="stable"), 5)
    return {
        "six cities, 2 silos": Split("six cities", _parts(cities, [300, 237]), 15),
        "six cities, 10 equal silos": Split("six cities", _parts(cities, [54] * 7 + [53] * 3), 35),
        "six cities, 5 silos sorted by outcome": Split("six cities", _rows(cities, by_outcome), 40),
        "six cities, 19 silos of 28 children": Split("six cities", _parts(cities, [29] * 5 + [28] * 14), 60),
        "Poisson, 4 silos": Split("Poisson", _parts(known["Poisson"].data, [50] * 4), 20),
        "linear, 4 silos": Split("linear", _parts(known["linear"].data, [50] * 4), 20),
    }


def _parts(data, sizes):
    return split_units(data, sizes, seed=1)[0]


def _rows(data, parts):
    return {f"silo{number}": {name: values[rows] for name, values in data.items()} for number, rows in enumerate(parts)}
