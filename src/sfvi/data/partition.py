"""Splitting one data set over silos, to try things out."""

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..errors import OptionError


def split_units(
    data: Any, sizes: Sequence[int] | Mapping[str, int], *, seed: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Deal the units (first axis of every array) at random to silos: `by_size`, then `take`.

    Args:
        data: Tree of arrays with the units on the first axis.
        sizes: Units per silo, by name or in order (then named silo-0, silo-1, ...).
        seed: Of the shuffle.

    Returns:
        Data by silo, and the original positions of each silo's units, for `unit_ids`.
    """
    lengths = {len(leaf) for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1:
        raise OptionError(f"split_units: the arrays have {sorted(lengths)} units; give as many of each.")
    total, dealt = lengths.pop(), sum(sizes.values() if isinstance(sizes, Mapping) else sizes)
    if dealt != total:
        raise OptionError(
            f"split_units: the sizes add up to {dealt}; they must add up to {total}, the number of units."
        )
    ids = by_size(sizes, seed=seed)
    return take(data, ids), ids


def take(data: Any, positions: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The data of each silo, from the positions of its units that a partitioner gave.

    Args:
        data: Tree of arrays with the units on the first axis.
        positions: Of each silo's units.
    """
    return {name: jax.tree.map(lambda leaf, rows=rows: leaf[rows], data) for name, rows in positions.items()}


def equally(total: int, num_silos: int, *, seed: int) -> dict[str, np.ndarray]:
    """Deal units at random to silos whose sizes differ by one at most.

    Args:
        total: Number of units.
        num_silos: Number of silos, named silo-0, silo-1, ...
        seed: Of the shuffle.

    Returns:
        Positions of each silo's units, in rising order.
    """
    return by_size(_even("equally", total, num_silos), seed=seed)


def by_size(sizes: Sequence[int] | Mapping[str, int], *, seed: int) -> dict[str, np.ndarray]:
    """Deal units at random to silos of given sizes, which add up to the number of units.

    Args:
        sizes: Units per silo, by name or in order (then named silo-0, silo-1, ...).
        seed: Of the shuffle.

    Returns:
        Positions of each silo's units, in rising order.
    """
    named = dict(sizes) if isinstance(sizes, Mapping) else dict(zip(_names(len(sizes)), sizes, strict=True))
    if not named or not all(isinstance(size, int | np.integer) and size >= 1 for size in named.values()):
        raise OptionError(
            f"by_size: the sizes are {list(named.values())}; give every silo a whole number, at least one unit."
        )
    order = np.random.default_rng(seed).permutation(sum(named.values()))
    ends = np.cumsum(list(named.values()))[:-1]
    return {name: np.sort(part) for name, part in zip(named, np.split(order, ends), strict=True)}


def by_order(values: Any, num_silos: int) -> dict[str, np.ndarray]:
    """Sort the units and cut them into parts whose sizes differ by one at most: silos as different as can be.

    Args:
        values: What to sort by, a number for each unit; units with the same one keep their order.
        num_silos: Number of silos, named silo-0, silo-1, ...

    Returns:
        Positions of each silo's units, in the order of their values.
    """
    values = np.asarray(values)
    if values.ndim != 1 or values.dtype.kind not in "biuf" or not np.isfinite(values).all():
        raise OptionError(f"by_order: {values.dtype} values of shape {values.shape}; give one finite number a unit.")
    sizes = _even("by_order", len(values), num_silos)
    parts = np.split(np.argsort(values, kind="stable"), np.cumsum(sizes)[:-1])
    return dict(zip(_names(num_silos), parts, strict=True))


def by_label(labels: Any, num_silos: int, *, share: float = 0.9, seed: int) -> dict[str, np.ndarray]:
    r"""Give every silo equally many units, most of them of one label: the paper's split of MNIST.

    Of a silo's $N$ units, `share` $N$ have the silo's own label, and all other labels are equally frequent (up to
    rounding) in the rest. Own labels go around: with labels 0 to 9, silo 12 has label 2, whatever the seed, so that the
    same call with the test labels gives every silo test units like its training units.

    $N$ is the largest possible, and the units beyond it are left out. If the number of silos is $k$ times that of
    labels, $kN$ units of each label are dealt, whatever `share`: the rarest label decides (MNIST over 10 silos: 5421
    training and 892 test images each; over 50 silos: 1084 and 178).

    Args:
        labels: Label of every unit.
        num_silos: Number of silos, named silo-0, silo-1, ...
        share: Of a silo's own label among its units, from 0 to 1.
        seed: Of the choice of units.

    Returns:
        Positions of each silo's units, in rising order.
    """
    values, codes, counts = _labels("by_label", labels, num_silos)
    if not 0 <= share <= 1:
        raise OptionError(f"by_label: share is {share}; it must lie between 0 and 1.")
    if share < 1 and len(values) == 1:
        raise OptionError(f"by_label: all labels are {values[0]}, so share must be 1, not {share}.")

    def too_large(size):
        return bool(np.any(_quotas(size, num_silos, len(values), share).sum(0) > counts))

    size = bisect.bisect_left(range(1, len(codes) // num_silos + 1), True, key=too_large)
    if size == 0:
        raise OptionError(
            f"by_label: {len(codes)} units, {counts.min()} of the rarest of {len(values)} labels, are too few for "
            f"{num_silos} silos with share {share}; use fewer silos."
        )
    return _deal(codes, _quotas(size, num_silos, len(values), share), np.random.default_rng(seed))


def dirichlet(labels: Any, num_silos: int, *, concentration: float, seed: int) -> dict[str, np.ndarray]:
    r"""Deal the units of each label to the silos in random proportions, drawn from a Dirichlet distribution.

    $$\pi_l \sim \mathrm{Dirichlet}(\alpha, \dots, \alpha), \quad n_{jl} \approx \pi_{lj} n_l$$

    $n_{jl}$ of the $n_l$ units with label $l$ go to silo $j$ (Yurochkin et al. 2019). Every unit is dealt once; silos
    differ in size as in labels.

    Args:
        labels: Label of every unit.
        num_silos: Number of silos, named silo-0, silo-1, ...
        concentration: $\alpha$; near 0 a label is all in one silo, at 100 and above silos are nearly alike.
        seed: Of the proportions and of the choice of units.

    Returns:
        Positions of each silo's units, in rising order.
    """
    _, codes, counts = _labels("dirichlet", labels, num_silos)
    if not (concentration > 0 and math.isfinite(concentration * num_silos)):
        raise OptionError(f"dirichlet: concentration is {concentration}; it must be positive and finite.")
    rng = np.random.default_rng(seed)
    proportions = rng.dirichlet(np.full(num_silos, float(concentration)), len(counts))
    ends = np.rint(proportions.cumsum(1) * counts[:, None]).astype(int)
    ends[:, -1] = counts
    quotas = np.diff(ends, axis=1, prepend=0).T
    if (empty := int((quotas.sum(1) == 0).sum())) > 0:
        raise OptionError(
            f"dirichlet: {empty} of {num_silos} silos got none of the {len(codes)} units; raise the concentration, use "
            "fewer silos or another seed."
        )
    return _deal(codes, quotas, rng)


def _even(function, total, num_silos):
    """Sizes that differ by one at most, the larger ones first."""
    if not isinstance(num_silos, int) or not 1 <= num_silos <= total:
        raise OptionError(
            f"{function}: the number of silos is {num_silos}; it must lie between 1 and {total}, the units."
        )
    each, more = divmod(total, num_silos)
    return [each + 1] * more + [each] * (num_silos - more)


def _names(num_silos):
    width = len(str(num_silos - 1))
    return [f"silo-{i:0{width}d}" for i in range(num_silos)]


def _labels(function, labels, num_silos):
    labels = np.asarray(labels)
    if labels.ndim != 1 or len(labels) == 0:
        raise OptionError(f"{function}: the labels have shape {labels.shape}; give one label a unit.")
    if num_silos < 1:
        raise OptionError(f"{function}: the number of silos is {num_silos}; it must be positive.")
    return np.unique(labels, return_inverse=True, return_counts=True)


def _quotas(size, num_silos, num_labels, share):
    """Units by silo and label. No entry falls when `size` grows, which the search for the largest relies on."""
    silo, label = np.arange(num_silos)[:, None], np.arange(num_labels)
    own = math.floor(share * size + 0.5)
    each, more = divmod(size - own, max(num_labels - 1, 1))
    # The rest does not always divide evenly: the labels that follow a silo's own get one more, so every label in turn.
    distance = (label - silo) % num_labels
    return np.where(distance == 0, own, each + (distance <= more))


def _deal(codes, quotas, rng):
    shuffled = rng.permutation(len(codes))
    by_code = shuffled[np.argsort(codes[shuffled], kind="stable")]
    starts = np.searchsorted(codes[by_code], np.arange(quotas.shape[1]))
    ends = starts + quotas.cumsum(0)
    silos = [[by_code[a:b] for a, b in zip(*ab, strict=True)] for ab in zip(ends - quotas, ends, strict=True)]
    return {name: np.sort(np.concatenate(silo)) for name, silo in zip(_names(len(quotas)), silos, strict=True)}
