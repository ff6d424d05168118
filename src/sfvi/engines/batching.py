"""Deciding how the silos of one process are computed together, exactly.

Three ways, each giving the digits of the silos one by one up to the order of sums:

- *merged*: units laid end to end as if one silo held them. For algorithms that use only the sum of replies; silos of
  any sizes, at the cost of pooled data.
- *stacked*: silos of equal shape side by side under `vmap`; those of different size are padded, the padding masked.
- alone: whatever fits neither.

Merging and padding assume that the program treats its plate members alike. That is checked, by value and gradient at
given points, and where it does not hold the next way is taken. Owners of elements (`model/owners.py`) are found anew.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._types import Theta
from ..errors import ModelError
from ..families import Local, StructuredLocal
from ..model import SiloData, StructuredModel, attribute
from .exactness import same_density, stack
from .units import take_apart

MAX_BUCKETS = 8
MAX_SHAPES = 8
MIN_RATIO = 1.5  # silos whose sizes differ by less than this share a bucket: compiling one more costs more than padding


class Batch(NamedTuple):
    """Silos that are computed together.

    Attributes:
        names: The silos, in order.
        data: One merged silo, or silos stacked on a leading axis.
        stacked: Which of the two.
        sizes: For each silo, the number of units of each plate.
    """

    names: tuple[str, ...]
    data: SiloData
    stacked: bool
    sizes: tuple[dict[str, int], ...]


def plan(
    model: StructuredModel, silos: Mapping[str, SiloData], theta: Theta, *, merge: bool, apart: bool = False
) -> list[Batch]:
    """Group the silos into batches.

    Args:
        model: The model.
        silos: Data of each silo, in order of name.
        theta: Any value of the trainable parameters, for the checks.
        merge: Whether the algorithm allows merging.
        apart: Whether it takes units one by one.
    """
    if apart:
        silos = {name: take_apart(model, name, silo, theta) for name, silo in silos.items()}
    batches = []
    for names in _by_program(silos):
        group = [silos[name] for name in names]
        merged = _merged(model, names, group, theta) if merge and len(names) > 1 else None
        if merged is not None:
            batches.append(merged)
            continue
        for bucket in _buckets(names, silos):
            batches += _stacked(model, bucket, [silos[name] for name in bucket], theta)
    return batches


def unit_counts(silo: SiloData) -> dict[str, int]:
    """Number of members of every plate."""
    return {plate.name: plate.size for plate in silo.program.layout.plates}


def local_families(batch: Batch, family: StructuredLocal) -> dict[str, StructuredLocal]:
    """Cut a batch's local family into those of its silos, without padding."""
    host = jax.tree.map(np.asarray, family)  # slices of NumPy arrays need no compilation
    families, start = {}, dict.fromkeys(host.units, 0)
    for index, (name, sizes) in enumerate(zip(batch.names, batch.sizes, strict=True)):
        one = jax.tree.map(lambda leaf, i=index: leaf[i], host) if batch.stacked else host
        units = {}
        for plate, block in one.units.items():
            window = slice(start[plate], start[plate] + sizes[plate])
            units[plate] = jax.tree.map(lambda leaf, w=window: jnp.asarray(leaf[..., w]), block)
            if not batch.stacked:
                start[plate] += sizes[plate]
        families[name] = StructuredLocal(jax.tree.map(jnp.asarray, one.silo), units)
    return families


def batch_family(batch: Batch, families: Mapping[str, StructuredLocal]) -> StructuredLocal:
    """Undo `local_families`: lay the silos' families end to end, or stack them, padded."""
    members = [jax.tree.map(np.asarray, families[name]) for name in batch.names]
    if not batch.stacked:
        units = {
            plate: jax.tree.map(
                lambda *leaves: jnp.asarray(np.concatenate(leaves, -1)), *[m.units[plate] for m in members]
            )
            for plate in members[0].units
        }
        return StructuredLocal(jax.tree.map(jnp.asarray, members[0].silo), units)
    most = {plate: max(sizes[plate] for sizes in batch.sizes) for plate in members[0].units}
    padded = []
    for member, sizes in zip(members, batch.sizes, strict=True):
        units = {}
        for plate, block in member.units.items():
            width = most[plate] - sizes[plate]
            units[plate] = jax.tree.map(lambda leaf, w=width: _pad_last(leaf, w), block)
        padded.append(StructuredLocal(member.silo, units))
    return stack(padded)


def members(batch: Batch, state: Any, silos: Mapping[str, SiloData]) -> dict[str, tuple[Any, SiloData]]:
    """Each silo's state and data. Of a merged batch only the family is cut up: its silos are one to the algorithm."""
    if batch.stacked:
        host = jax.tree.map(np.asarray, (state, batch.data))
        rows = [jax.tree.map(lambda leaf, i=index: jnp.asarray(leaf[i]), host) for index in range(len(batch.names))]
        return dict(zip(batch.names, rows, strict=True))
    families = local_families(batch, state.family)
    return {name: (state._replace(family=families[name]), silos[name]) for name in batch.names}


def _pad_last(leaf, width):
    return np.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, width)], mode="edge")


def _by_program(silos):
    """Silos that run the same function on the same structure of data, with the same plates and blocks."""
    groups: dict = {}
    for name, silo in silos.items():
        layout = silo.program.layout
        blocks = tuple((group.plate.name, group.block) for group in layout.groups)
        plates = tuple(plate.name for plate in layout.plates)
        shape = (_ranks(silo), plates, blocks, layout.own.size, tuple(sorted(silo.owners)))
        key = (id(silo.program.program), silo.program.signature, *shape)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _ranks(silo):
    return tuple((name, leaf.ndim, leaf.dtype) for name, leaf in silo.values.items())


def _merged(model, names, group, theta) -> Batch | None:
    layouts = [silo.program.layout for silo in group]
    if any(layout.own.size or layout.subsampled for layout in layouts):
        return None
    axes = _concat_axes(group)
    if axes is None:
        return None
    few = _representatives(group)
    trial = _concatenate(model, names, few, axes)
    if trial is None or not same_density(few, [trial], theta):
        return None
    merged = trial if len(few) == len(group) else _concatenate(model, names, group, axes)
    if merged is None:
        return None
    merged = attribute(merged, theta)
    if merged.owners.keys() != group[0].owners.keys():
        return None
    return Batch(tuple(names), merged, False, tuple(map(unit_counts, group)))


def _concat_axes(group):
    """For every leaf the axis along which silos are laid end to end, or None to keep one copy."""
    axes = {}
    counts = [unit_counts(silo) for silo in group]
    for name in group[0].values:
        shapes = [silo.values[name].shape for silo in group]
        axis = next((a for a in range(len(shapes[0])) if _follows_plate(shapes, counts, a)), None)
        if axis is not None and len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) > 1:
            return None
        if axis is None and not all(_equal(silo.values[name], group[0].values[name]) for silo in group):
            return None
        axes[name] = axis
    return axes


def _follows_plate(shapes, counts, axis):
    return any(all(s[axis] == c.get(p) for s, c in zip(shapes, counts, strict=True)) for p in counts[0])


def _equal(left, right):
    return left.shape == right.shape and bool(jnp.all(left == right))


def _representatives(group: Sequence[SiloData]) -> list[SiloData]:
    """The silos on which a way of computing together is checked, in order.

    All of them, unless they have more than `MAX_SHAPES` different shapes, each of which has to be compiled: then all
    silos of the smallest, the largest and evenly spaced shapes between.
    """
    shapes = sorted({silo.program: _volume(silo) for silo in group}.items(), key=lambda item: item[1])
    chosen = {shapes[i][0] for i in np.linspace(0, len(shapes) - 1, min(MAX_SHAPES, len(shapes))).astype(int)}
    return [silo for silo in group if silo.program in chosen]


def _volume(silo):
    return sum(leaf.size for leaf in silo.values.values())


def _concatenate(model, names, group, axes) -> SiloData | None:
    values = {
        name: group[0].values[name] if axis is None else _join([silo.values[name] for silo in group], axis)
        for name, axis in axes.items()
    }
    program = _try_shapes(model, names[0], group[0], values)
    if program is None:
        return None
    counts = [unit_counts(silo) for silo in group]
    units = {unit.plate.name for unit in group[0].program.layout.groups}
    for plate in program.layout.plates:
        sizes = [count[plate.name] for count in counts]
        fixed = plate.name not in units and {plate.size} == set(sizes)
        if plate.size != sum(sizes) and not fixed:
            return None
    units = {plate: _join([silo.ids.units[plate] for silo in group], 1) for plate in group[0].ids.units}
    num_units = jnp.asarray(sum(float(silo.num_units) for silo in group), jnp.result_type(float))
    return SiloData(values, {}, Local(group[0].ids.silo, units), num_units, program)


def _buckets(names, silos):
    """Silos of similar size together, at most `MAX_BUCKETS` of them."""
    volumes = {name: _volume(silos[name]) for name in names}
    low, high = min(volumes.values()), max(volumes.values())
    ratio = max(MIN_RATIO, (high / low) ** (1 / MAX_BUCKETS) * (1 + 1e-9))
    buckets: dict[int, list[str]] = {}
    for name, volume in volumes.items():
        buckets.setdefault(int(np.log(volume / low) / np.log(ratio)), []).append(name)
    return [buckets[level] for level in sorted(buckets)]


def _stacked(model, names, group, theta) -> list[Batch]:
    same_shape: dict = {}
    for name, silo in zip(names, group, strict=True):
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(silo.apart))
        same_shape.setdefault((silo.program, shapes), []).append((name, silo))
    if len(same_shape) > 1:
        padded = _padded(model, names, group, theta)
        if padded is not None:
            return [Batch(tuple(names), stack(padded), True, tuple(map(unit_counts, group)))]
    batches = []
    for members in same_shape.values():
        own_names, own = zip(*members, strict=True)
        batches.append(Batch(own_names, stack(own), True, tuple(map(unit_counts, own))))
    return batches


def _join(leaves, axis):
    """Concatenate on the host: XLA would compile anew for every number of arrays."""
    return jnp.asarray(np.concatenate([np.asarray(leaf) for leaf in leaves], axis))


def _padded(model, names, group, theta) -> list[SiloData] | None:
    """Bring silos to one shape by repeating the last member of each plate, or None if that is not exact."""
    counts = [unit_counts(silo) for silo in group]
    target = {plate: max(c[plate] for c in counts) for plate in counts[0]}
    ragged = [plate for plate in target if len({c[plate] for c in counts}) > 1]
    axes = {}
    for name in group[0].values:
        shapes = [silo.values[name].shape for silo in group]
        for axis in range(len(shapes[0])):
            if len({shape[axis] for shape in shapes}) == 1:
                continue
            plate = next((p for p in ragged if all(s[axis] == c[p] for s, c in zip(shapes, counts, strict=True))), None)
            if plate is None:
                return None
            axes[name, axis] = target[plate]
    if any(
        plate.drawn > c[plate.name]
        for silo, c in zip(group, counts, strict=True)
        for plate in silo.program.layout.plates
    ):
        return None
    values = [
        {n: _pad(leaf, {a: axes[n, a] for a in range(leaf.ndim) if (n, a) in axes}) for n, leaf in silo.values.items()}
        for silo in group
    ]
    program = _try_shapes(model, names[0], group[0], values[0])
    if program is None:
        return None
    padded = [
        SiloData(
            value,
            {plate: jnp.asarray(count[plate], jnp.int32) for plate in ragged},
            Local(silo.ids.silo, {p: _pad(ids, {1: target[p]}) for p, ids in silo.ids.units.items()}),
            silo.num_units,
            program,
        )
        for value, count, silo in zip(values, counts, group, strict=True)
    ]
    few = {id(silo) for silo in _representatives(group)}
    pairs = [(silo, pad) for silo, pad in zip(group, padded, strict=True) if id(silo) in few]
    originals, copies = zip(*pairs, strict=True)
    if not same_density(originals, copies, theta):
        return None
    padded = [attribute(silo, theta) for silo in padded]
    if any(silo.owners.keys() != group[0].owners.keys() for silo in padded):
        return None
    if group[0].apart is None:
        return padded
    if group[0].apart.rows is not None:  # tables of different lengths stay apart
        return None
    return [take_apart(model, name, silo, theta) for name, silo in zip(names, padded, strict=True)]


def _try_shapes(model, name, silo, values):
    try:
        return model.at_shapes(name, silo, values)
    except ModelError:  # the program does not run at these sizes
        return None


def _pad(leaf, sizes):
    widths = [(0, sizes.get(axis, n) - n) for axis, n in enumerate(leaf.shape)]
    if not any(high for _, high in widths):
        return leaf
    return jnp.pad(leaf, widths, mode="edge")
