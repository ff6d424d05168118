r"""Whether each unit's $q(z_i \mid z_G)$ is its posterior: a k-hat for every unit, which stays in the silo."""

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import numpy as np
import pandas as pd

from .._compile import on_one_thread
from .._random import as_key
from .._types import Key
from ..enhanced import weigh_units
from .importance import smooth
from .verdicts import Trust, say

if TYPE_CHECKING:
    from ..posterior import SiloPosterior

OFF = 0.3  # sds, or log sds, by which a unit's posterior may be off
FEW, MOST = 0.05, 0.25  # shares of units that are off: fine, and still doubtful
MANY = 2000  # units whose k-hat is computed; of more, evenly spread ones
AT_A_TIME = 2 * 10**7  # numbers drawn together


@dataclasses.dataclass(frozen=True)
class UnitsCheck:
    """The check "units". It says something of every unit, so it belongs to the silo.

    Attributes:
        trust: How far to trust the units' posteriors.
        verdict: Why.
        table: A row for each unit looked at: its plate and its label, or position; k-hat of its weights; how far the
            weighted mean is from that of the posterior as it is sampled, in sds, and the log ratio of the sds, of the
            latent that is furthest off.
        threshold: A good k-hat is not larger.
    """

    trust: Trust
    verdict: str
    table: pd.DataFrame = dataclasses.field(repr=False)
    threshold: float
    name: str = "units"


def check_units(silo: "SiloPosterior", *, key: Key | int = 0, num_draws: int = 512) -> UnitsCheck | None:
    """Weigh draws of every unit at the center of the global posterior; None if units cannot be told apart.

    Args:
        silo: The silo's posterior.
        key: Of the draws.
        num_draws: Of each unit.
    """
    data, shared = silo.data, silo.shared.shared
    groups = data.program.layout.groups
    if not groups or not data.program.separates(shared.theta, data):
        return None
    looked_at = {group.plate.name: _spread(group.plate.size) for group in groups}
    numbers = sum(group.block * group.plate.size for group in groups)
    pieces = math.ceil(num_draws * numbers / AT_A_TIME)
    together = math.ceil(num_draws / pieces)

    @on_one_thread
    def run(key, shared, local, data):
        z_global = shared.family.center
        own = None if local.silo is None else local.silo.mean(z_global - z_global)
        noise = {
            group.plate.name: jax.random.normal(
                jax.random.fold_in(key, position), (together, group.block, group.plate.size), z_global.dtype
            )
            for position, group in enumerate(groups)
        }
        draws, (_, log_weights) = weigh_units(data, shared, local, z_global, own, noise)
        return {plate: (draws[plate][..., units], log_weights[plate][..., units]) for plate, units in looked_at.items()}

    keys = [as_key(key)] if pieces == 1 else jax.random.split(as_key(key), pieces)
    parts = [jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), run(k, shared, silo.family, data)) for k in keys]
    rows = []
    for plate, units in looked_at.items():
        z, weights = (np.concatenate([part[plate][i] for part in parts])[:num_draws] for i in (0, 1))
        names = silo.shared.model.coords.get(plate, ())
        for place, unit in enumerate(units):
            found = _look(z[:, :, place], weights[:, place], silo.shared.bound.draws_of_units)
            rows.append([plate, names[unit] if len(names) > units[-1] else unit, *found])
    threshold = float(min(1 - 1 / np.log10(num_draws), 0.7))
    table = pd.DataFrame(rows, columns=["plate", "unit", "k_hat", "shift of mean, in sds", "log ratio of sds"])
    trust, why = _judge(table, threshold)
    return UnitsCheck(trust, say(trust, why), table, threshold)


def _spread(size):
    """Positions of the units that are looked at."""
    return np.unique(np.linspace(0, size - 1, min(size, MANY)).astype(int))


def _look(draws, log_weights, num_choices):
    """k-hat of one unit, and how far its posterior as sampled, one of `num_choices` draws, is from the weighted."""
    if not (np.all(log_weights < np.inf) and np.any(np.isfinite(log_weights))):
        return np.inf, np.nan, np.nan
    weights, k_hat = smooth(log_weights)
    mean, sd = _moments(draws, weights)
    num_choices = min(num_choices, len(draws))
    whole = len(draws) // num_choices * num_choices
    grouped = log_weights[:whole].reshape(-1, num_choices)
    within = np.exp(grouped - grouped.max(1, keepdims=True))
    sampled = (within / within.sum(1, keepdims=True)).ravel() / len(grouped)
    own_mean, own_sd = _moments(draws[:whole], sampled)
    shift, stretch = (mean - own_mean) / own_sd, np.log(sd / own_sd)
    return k_hat, shift[np.argmax(np.abs(shift))], stretch[np.argmax(np.abs(stretch))]


def _moments(draws, weights):
    mean = weights @ draws
    return mean, np.sqrt(np.maximum(weights @ (draws - mean) ** 2, np.finfo(float).tiny))


def _judge(table, threshold) -> tuple[Trust, str]:
    total, heavy = len(table), int((table["k_hat"] > threshold).sum())
    shift, stretch = (table[column].abs() for column in ("shift of mean, in sds", "log ratio of sds"))
    off = ~((shift <= OFF) & (stretch <= OFF) & (table["k_hat"] <= 1))  # what is no number is off too
    found, many = int(off.sum()), "is" if off.sum() == 1 else "are"
    units = "unit" if total == 1 else "units"
    words = f"k-hat is above {threshold:.2f} in {heavy} of {total} {units}; {found or 'none'} {many} off by more than "
    words += f"{OFF:g} sd or {'has' if found == 1 else 'have'} one above 1"
    if off.mean() <= FEW:
        return "fine", f"{words}."
    example = table.loc[np.maximum(shift, stretch).fillna(np.inf).idxmax()]
    words += f", most in {example['plate']!r}: {example['unit']}"
    if off.mean() <= MOST:
        return "doubtful", f"{words}."
    remedy = "run longer, or with families.block(within='full') or more draws in bounds.locally_enhanced"
    return "do not trust", f"{words}; {remedy}."
