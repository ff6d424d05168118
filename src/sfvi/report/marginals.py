"""Marginals of a posterior, from draws: of sites with many coordinates some."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..families import Local
from .html import Html, count, number, table, tag
from .pictures import density

if TYPE_CHECKING:
    from ..posterior import GlobalPosterior, SiloPosterior

MOST = 30  # rows of the table of global latents
MOST_UNITS = 60  # lines of a forest plot
FEW = 8  # coordinates of a site that are shown in a table, not as a forest
MOST_EFFECTS = 6  # of a unit that have a forest each
NUMBERS = 10_000_000  # drawn at a time
CHUNKS = 4


class Marginal(NamedTuple):
    """Draws of one coordinate, and its names: as it stands alone, and among others of its site."""

    label: str
    short: str
    draws: np.ndarray


class Marginals(NamedTuple):
    """By what a site is called, the coordinates that are shown and how many are not; and the number of draws."""

    shown: dict[str, list[Marginal]]
    left_out: dict[str, int]
    num_samples: int


def global_marginals(posterior: "GlobalPosterior") -> Marginals:
    """Of the global latents and deterministic sites; of those with many coordinates the first ones."""
    wording = posterior.model.wording
    shapes = jax.eval_shape(lambda: posterior.sample(0, 1))
    latents = [site.name for site in posterior.model.population.layout.sites]
    places = {wording.name(name): place for place, name in reversed(list(enumerate(latents)))}
    order = [name for name in [*latents, *(n for n in shapes if n not in latents)] if name not in wording.hidden]
    order.sort(
        key=lambda name: places.get(wording.name(name), len(latents))
    )  # as in the program, then what is computed
    sizes = {name: math.prod(shapes[name].shape[1:]) for name in order}
    taken = share(sizes, MOST)
    per_call = max(50, min(4000, NUMBERS // max(1, sum(math.prod(s.shape) for s in shapes.values()))))
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(1 if per_call == 4000 else CHUNKS)]
    first = {name: np.arange(wanted) for name, wanted in taken.items()}
    parts = [_chosen(posterior.sample(key, per_call), first) for key in keys]
    draws = {name: np.concatenate([part[name] for part in parts]) for name in order}
    labels, named = posterior.labels(shapes), {name: wording.name(name) for name in order}
    shown = {named[name]: _marginals(name, draws[name], labels[name], first[name], wording) for name in order}
    left_out = {named[name]: sizes[name] - taken[name] for name in order}
    return Marginals(shown, left_out, per_call * len(keys))


def silo_marginals(silo: "SiloPosterior") -> Marginals:
    """Of the silo's own latents and deterministic sites; of those with many coordinates the extremes, in order."""
    wording = silo.shared.model.wording
    shapes = {name: values.shape for name, values in _outputs(silo).items()}
    size = sum(math.prod(shape) for shape in shapes.values())
    num_samples = max(100, min(2000, NUMBERS // max(1, size)))
    draws = silo.sample(0, num_samples) if shapes else {}
    labels, shown, left_out = silo.labels(draws), {}, {}
    for name, shape in shapes.items():
        if name in wording.hidden:
            continue
        values = np.asarray(draws[name].reshape(num_samples, -1), np.float64)
        for title, coordinates in _series(wording.name(name), shape, labels[name]):
            by_mean = coordinates
            if len(coordinates) > FEW:
                by_mean = coordinates[np.argsort(values[:, coordinates].mean(0), kind="stable")]
            half = MOST_UNITS // 2
            kept = by_mean if len(by_mean) <= MOST_UNITS else np.r_[by_mean[:half], by_mean[-half:]]
            shown[title] = _marginals(
                name, values[:, kept], labels[name], kept, wording, of_one_effect=len(coordinates) < math.prod(shape)
            )
            left_out[title] = len(by_mean) - len(kept)
    return Marginals(shown, left_out, num_samples)


def _series(name, shape, labels):
    """Coordinates that are compared with each other: of units with a few effects each, those of one effect."""
    places = np.arange(math.prod(shape)).reshape(shape)
    if len(shape) != 2 or not 1 < shape[1] <= MOST_EFFECTS or shape[0] <= FEW:
        return [(name, places.ravel())]
    return [(f"{name}[…, {label}]", places[:, k]) for k, label in enumerate(labels[1])]


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


def _chosen(draws: Mapping[str, Any], places: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(draws[name].reshape(len(draws[name]), -1)[:, wanted], np.float64)
        for name, wanted in places.items()
    }


def _marginals(name, draws, labels, places, wording, *, of_one_effect=False) -> list[Marginal]:
    shape = tuple(len(axis) for axis in labels)
    made = []
    for column, place in zip(draws.T, places, strict=True):
        index = np.unravel_index(place, shape) if shape else ()
        inside = tuple(axis[int(i)] for axis, i in zip(labels, index, strict=True))
        among = inside[:-1] if of_one_effect else inside
        made.append(Marginal(wording.coordinate(name, inside), ", ".join(among), column))
    return made
