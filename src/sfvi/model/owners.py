r"""Whose a term is that lies outside the units' plates, as in tables with a row for each visit.

$$\log p(y_j, z_L \mid z_G) = r + \sum_i \ell_i, \qquad
  \ell_i = \log p_i + \sum_{n : g(n) = i} \log p(y_n \mid z_i, z_G)$$

The sites inside a unit's plate say by their place whose they are. Of the others, each element has an owner $g(n)$ if it
depends on the latents of one unit only; that is found by what the program computes from the silo's data, so however the
rows are led to their units. Elements that depend on no unit belong to the rest $r$.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .. import _jaxpr
from .._compile import on_one_thread
from .._types import Theta
from ..families import Local
from .layout import LocalLayout
from .programs import SiloData
from .tracing import Structure, execute, initial_params, log_probs

SCALES = (0.1, 0.5, 1.0)  # of random latents, each with both signs: at a single point max(z, 0) may be flat


def loose_sites(
    program: Callable, args: tuple, structure: Structure, layout: LocalLayout, shared: Collection[str]
) -> tuple[str, ...]:
    """Sites outside all plates of units that are computed from units' latents; none are looked for with minibatches.

    Args:
        program: Both programs in one, as written.
        args: Its arguments.
        structure: What `inspect` found in it.
        layout: Which latents are units'.
        shared: Sites of the population program.
    """
    plates = {group.plate.name for group in layout.groups}
    outside = [name for name, frames in structure.frames.items() if name not in shared and not frames & plates]
    if not plates or not outside or layout.subsampled:
        return ()
    floating = jnp.result_type(float)
    free = {site.name: jax.ShapeDtypeStruct(site.free_shape, floating) for site in structure.latents}
    theta = jax.eval_shape(lambda key: initial_params(program, key, args), jax.random.key(0))
    units = {site.name: free.pop(site.name) for group in layout.groups for site in group.sites}

    def terms(units, free, theta):
        found = log_probs(execute(program, args, units | free, theta, {})[1], {})
        return [found[name] for name in outside]

    used = _jaxpr.dependence(terms, units, free, theta)
    return tuple(name for name, inputs in zip(outside, used, strict=True) if any(inputs[: len(units)]))


def attribute(data: SiloData, theta: Theta) -> SiloData:
    r"""Give a silo's data the owners of all elements of its loose sites; a site is left out if an element has several.

    Units are numbered through all plates, and told apart by the digits of their binary numbers. For each digit, the
    derivative of an element along random directions of all units with a 1 there, and of those with a 0: an element
    has one owner if exactly one of the two is nonzero, digit by digit, and then the digits are its owner's. Zeros
    are exact, so nothing has to be tolerated.
    """
    if not data.program.loose:
        return data
    try:
        with jax.enable_x64(True):
            double, start = jax.tree.map(_double, (data, theta))
            touched = _touched(double, start, _points(data.program), _masks(data.program.layout))
            touched = jax.tree.map(np.asarray, touched)
    except (TypeError, ValueError):  # the program insists on its own precision: nothing can be said
        return data
    rest = sum(group.plate.size for group in data.program.layout.groups)
    found = {site: _decode(digits, rest) for site, digits in touched.items()}
    owners = {site: jnp.asarray(numbers) for site, numbers in found.items() if numbers is not None}
    return dataclasses.replace(data, owners=owners)


def _decode(touched: np.ndarray, rest: int) -> np.ndarray | None:
    """The owner of each element, `rest` for those without; None if one has several."""
    zeros, ones = touched[:, 0], touched[:, 1]
    single, free = np.all(zeros != ones, axis=0), ~np.any(zeros | ones, axis=0)
    if not np.logical_or(single, free).all():
        return None
    numbers = np.tensordot(1 << np.arange(len(ones)), ones, axes=1)
    return np.where(single, numbers, rest).astype(np.int32)


@on_one_thread
def _touched(data: SiloData, theta: Theta, points: "_Point", masks: dict[str, Array]) -> dict[str, Array]:
    """For each digit, and 0 or 1 there: which elements depend on the units that have it."""
    program = data.program

    def at(point, mask):
        others = jax.tree.map(lambda leaf: leaf + point.shift, theta)

        def terms(units):
            found = program.log_terms(point.z_global, Local(point.z_local.silo, units), others, data, {})
            return {site: found[site] for site in program.loose}

        tangents = jax.tree.map(jnp.multiply, point.directions, mask)
        return jax.jvp(terms, (point.z_local.units,), (tangents,))[1]

    def anywhere(mask):
        return jax.tree.map(_nonzero, jax.lax.map(lambda point: at(point, mask), points))

    return jax.lax.map(lambda pair: jax.lax.map(anywhere, pair), masks)


def _nonzero(changes):
    """Whether a derivative is nonzero at any point. One that overflows says nothing, unless it does so everywhere."""
    finite = jnp.isfinite(changes)
    return jnp.any(finite & (changes != 0), axis=0) | ~jnp.any(finite, axis=0)


class _Point(NamedTuple):
    """Latents, how far the parameters are from their start, and a direction for every unit."""

    z_global: Array
    z_local: Local
    shift: Array
    directions: dict[str, Array]


def _points(program):
    """Random ones, nearer to zero and farther away; drawn by NumPy, since random numbers take long to compile."""
    layout, generator = program.layout, np.random.default_rng(0)
    scale = np.array([*SCALES, *(-s for s in SCALES)])

    def normal(*shape):
        draws = np.tile(generator.normal(size=(len(SCALES), *shape)), (2, *(1 for _ in shape)))
        return jnp.asarray(draws * scale.reshape(-1, *(1 for _ in shape)))

    own = normal(layout.own.size, 1) if layout.own.size else None
    units, directions = ({g.plate.name: normal(g.block, g.plate.size) for g in layout.groups} for _ in range(2))
    return _Point(normal(program.population.layout.size), Local(own, units), jnp.asarray(scale), directions)


def _masks(layout):
    """For each digit, and 0 or 1 there, 1 for the units that have it: arrays of digit, 0 or 1, and unit."""
    ends = np.cumsum([group.plate.size for group in layout.groups])
    digits = np.arange(ends[-1]) >> np.arange(max(1, int(ends[-1] - 1).bit_length()))[:, None] & 1
    parts = np.split(np.stack([1 - digits, digits], axis=1).astype(float), ends[:-1], axis=2)
    return {group.plate.name: jnp.asarray(part) for group, part in zip(layout.groups, parts, strict=True)}


def _double(leaf):
    return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
