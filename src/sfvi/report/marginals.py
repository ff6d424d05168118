"""Marginals of a posterior, from draws: of sites with many coordinates the first ones."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..export import coordinate
from ..families import Local
from .html import Html, count, number, table, tag
from .pictures import density

if TYPE_CHECKING:
    from ..posterior import GlobalPosterior, SiloPosterior

MOST = 30  # rows of the table of global latents
MOST_UNITS = 60  # lines of a forest plot
NUMBERS = 10_000_000  # drawn at a time
CHUNKS = 4


class Marginal(NamedTuple):
    """Draws of one coordinate."""

    label: str
    draws: np.ndarray


class Marginals(NamedTuple):
    """Of each site, the coordinates that are shown and how many are not; and the number of draws."""

    shown: dict[str, list[Marginal]]
    left_out: dict[str, int]
    num_samples: int


def global_marginals(posterior: "GlobalPosterior") -> Marginals:
    """Of the global latents and deterministic sites."""
    shapes = jax.eval_shape(lambda: posterior.sample(0, 1))
    latents = [site.name for site in posterior.model.population.layout.sites]
    order = [*latents, *(name for name in shapes if name not in latents)]  # as in the program, then what is computed
    sizes = {name: math.prod(shapes[name].shape[1:]) for name in order}
    taken = share(sizes, MOST)
    per_call = max(50, min(4000, NUMBERS // max(1, sum(sizes.values()))))
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(1 if per_call == 4000 else CHUNKS)]
    parts = [_first(posterior.sample(key, per_call), taken) for key in keys]
    return _marginals(parts, posterior.labels(shapes), sizes, taken)


def silo_marginals(silo: "SiloPosterior") -> Marginals:
    """Of the silo's own latents and deterministic sites."""
    sizes = {name: math.prod(values.shape) for name, values in _outputs(silo).items()}
    taken = {name: min(size, MOST_UNITS) for name, size in sizes.items()}
    num_samples = max(100, min(2000, NUMBERS // max(1, sum(sizes.values()))))
    draws = silo.sample(0, num_samples) if sizes else {}
    return _marginals([_first(draws, taken)], silo.labels(draws), sizes, taken)


def _outputs(silo):
    """Shapes of the silo's own sites."""
    program, theta, data = silo.data.program, silo.shared.shared.theta, silo.data
    layout, shared = program.layout, program.population.layout.size
    own = jnp.zeros((layout.own.size, 1)) if layout.own.size else None
    units = {group.plate.name: jnp.zeros((group.block, group.plate.size)) for group in layout.groups}
    return jax.eval_shape(lambda: program.outputs(jnp.zeros(shared), Local(own, units), theta, data))


def share(sizes: Mapping[str, int], most: int) -> dict[str, int]:
    """How many coordinates of each site to show: every site some, and what small ones leave goes to the large."""
    taken = dict.fromkeys(sizes, 0)
    left = most
    while left > 0:
        open_ = [name for name, size in sizes.items() if taken[name] < size]
        if not open_:
            break
        each = max(1, left // len(open_))
        for name in open_:
            more = min(each, sizes[name] - taken[name], left)
            taken[name] += more
            left -= more
    return taken


def marginals_table(found: Marginals, *, caption: str) -> Html:
    """Mean, sd, quantiles and a small density of each coordinate."""
    rows = []
    for site, marginals in found.shown.items():
        sds = [one.draws.std(ddof=1) for one in marginals]
        scale = min((sd for sd in sds if sd > 0), default=None)  # the same number of places in all lines of a site
        for one, sd in zip(marginals, sds, strict=True):
            low, middle, high = np.quantile(one.draws, [0.025, 0.5, 0.975])
            cells = [number(value, scale, digits=2) for value in (one.draws.mean(), sd, low, middle, high)]
            rows.append([tag("code", one.label), *cells, density(one.draws)])
        if found.left_out[site] and marginals:
            rows.append([tag("em", f"{count(found.left_out[site], 'more coordinate')} of {site}"), *[""] * 6])
    unseen = [site for site, marginals in found.shown.items() if not marginals]
    if unseen:
        rows.append([tag("em", f"{count(len(unseen), 'more site')}"), *[""] * 6])
    head = ["coordinate", "mean", "sd", "2.5%", "median", "97.5%", "density"]
    return table(head, rows, caption=caption, numbers=range(1, 6))


def _first(draws: Mapping[str, Any], taken: Mapping[str, int]) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(draws[name].reshape(len(draws[name]), -1)[:, :wanted], np.float64)
        for name, wanted in taken.items()
    }


def _marginals(parts, labels, sizes, taken) -> Marginals:
    shown, number_of_draws = {}, 0
    for name, wanted in taken.items():
        columns = np.concatenate([part[name] for part in parts])
        number_of_draws = len(columns)
        names = _names(name, labels[name], wanted)
        shown[name] = [Marginal(label, columns[:, i]) for i, label in enumerate(names)]
    return Marginals(shown, {name: sizes[name] - taken[name] for name in sizes}, number_of_draws)


def _names(name, labels, wanted) -> Iterable[str]:
    shape = tuple(len(axis) for axis in labels)
    return [
        coordinate(name, labels, tuple(map(int, np.unravel_index(i, shape)))) if shape else name for i in range(wanted)
    ]
