"""Splitting one data set over silos, to try things out."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..errors import OptionError


def split_units(
    data: Any, sizes: Sequence[int] | Mapping[str, int], *, seed: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Deal the units (first axis of every array) at random to silos.

    Args:
        data: Tree of arrays with the units on the first axis.
        sizes: Units per silo, by name or in order (then named silo-0, silo-1, ...).
        seed: Of the shuffle.

    Returns:
        Data by silo, and the original positions of each silo's units, for `unit_ids`.
    """
    if not isinstance(sizes, Mapping):
        width = len(str(len(sizes) - 1))
        sizes = {f"silo-{i:0{width}d}": size for i, size in enumerate(sizes)}
    total = len(jax.tree.leaves(data)[0])
    if sum(sizes.values()) != total or min(sizes.values()) < 1:
        raise OptionError(
            f"split_units: the sizes add up to {sum(sizes.values())} with a smallest of "
            f"{min(sizes.values())}; they must be positive and add up to {total}."
        )
    order = np.random.default_rng(seed).permutation(total)
    ends = np.cumsum(list(sizes.values()))[:-1]
    ids = {name: np.sort(part) for name, part in zip(sizes, np.split(order, ends), strict=True)}
    silos = {name: jax.tree.map(lambda leaf, i=i: leaf[i], data) for name, i in ids.items()}
    return silos, ids
