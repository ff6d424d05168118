r"""A silo's units one by one: each as the silo that would hold it alone.

$$\mathcal{L}_j = r + \sum_i \ell_i(y_i)$$

where $\ell_i$ is computed from the data of unit i and from what all units have in common, and from nothing else. Units
are the members of the plate with local latents, or of the only plate. Data are cut along the axes that have the
plate's length; in tables with a row for each visit every unit takes its rows (`owners.py`), filled up to the longest.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..errors import ModelError, OptionError
from ..families import Local
from .programs import SiloData, SiloProgram

if TYPE_CHECKING:
    from .structured import StructuredModel

MOST_WAYS = 16  # of cutting, where several axes have the plate's length


class Rows(eqx.Module):
    """Which rows of a table are whose.

    Attributes:
        index: Numbers of each unit's rows, the last of them repeated.
        count: How many are real.
        plate: The rows' plate.
    """

    index: Int[Array, "units most"]
    count: Int[Array, " units"]
    plate: str = eqx.field(static=True)


class Apart(eqx.Module):
    """How single units are taken out of a silo's data.

    Attributes:
        program: The silo's program at the shapes of one unit.
        plate: The units' plate.
        axes: For each leaf of the data the axis of its units, or of its rows; None for what all have in common.
        numbers: Leaves that say of each row whose it is.
        rows: None where units have no table of rows.
    """

    program: SiloProgram = eqx.field(static=True)
    plate: str = eqx.field(static=True)
    axes: tuple[tuple[str, int | None, bool], ...] = eqx.field(static=True)
    numbers: tuple[str, ...] = eqx.field(static=True)
    rows: Rows | None

    def take(self, data: SiloData, unit: Int[Array, ""]) -> SiloData:
        """One unit as a silo."""
        values = {}
        for name, axis, of_rows in self.axes:
            leaf = data.values[name]
            if axis is None:
                values[name] = leaf
            elif of_rows and self.rows is not None:
                values[name] = jnp.take(leaf, self.rows.index[unit], axis=axis)
            else:
                values[name] = jnp.take(leaf, unit[None], axis=axis)
            if name in self.numbers:
                values[name] = jnp.zeros_like(values[name])
        sizes = {} if self.rows is None else {self.rows.plate: self.rows.count[unit]}
        owners = {} if self.rows is None else {site: jnp.zeros_like(self.rows.index[unit]) for site in data.owners}
        ids = {plate: jnp.take(words, unit[None], axis=1) for plate, words in data.ids.units.items()}
        return SiloData(values, sizes, Local(data.ids.silo, ids), jnp.ones(()), self.program, owners)

    def nobody(self, data: SiloData) -> SiloData:
        """A silo without units, of which only its own latents count; it holds no number of anybody's."""
        one = self.take(data, jnp.zeros((), jnp.int32))
        zero = jnp.zeros((), jnp.int32)
        sizes = {self.plate: zero} | ({} if self.rows is None else {self.rows.plate: zero})
        cut = {name for name, axis, _ in self.axes if axis is not None}
        values = {name: jnp.zeros_like(leaf) if name in cut else leaf for name, leaf in one.values.items()}
        return dataclasses.replace(one, values=values, sizes=sizes, program=self.program.without(*sizes))

    def num_units(self, data: SiloData) -> int:
        """How many places for units there are, those of padding included."""
        return next(plate.size for plate in data.program.layout.plates if plate.name == self.plate)


def ways_apart(model: "StructuredModel", name: str, data: SiloData, plates_of: dict[str, set[str]]) -> Iterator[Apart]:
    """Ways to take units apart that fit the shapes; whether one is right must be tried.

    Args:
        model: The model.
        name: The silo.
        data: Its data.
        plates_of: For each observed site and factor of its program the plates that it is in.
    """
    plate = _unit_plate(name, data)
    size = {each.name: each.size for each in data.program.layout.plates}
    rows = _rows(name, data, plate, plates_of)
    choices = []
    for leaf, value in data.values.items():
        found = [(axis, False) for axis, n in enumerate(value.shape) if n == size[plate]]
        if rows is not None:
            found += [(axis, True) for axis, n in enumerate(value.shape) if n == size[rows.plate]]
        choices.append([(leaf, *each) for each in found] or [(leaf, None, False)])
    for axes in itertools.islice(itertools.product(*choices), MOST_WAYS):
        numbers = _numbers(data, rows, axes)
        shapes = {
            leaf: jnp.zeros(_cut(data.values[leaf].shape, axis, of_rows, rows), data.values[leaf].dtype)
            for leaf, axis, of_rows in axes
        }
        try:
            program = model.at_shapes(name, data, shapes)
        except ModelError:  # it does not run with a single unit, cut in this way
            continue
        yield Apart(program, plate, axes, numbers, rows)


def _unit_plate(name, data):
    layout = data.program.layout
    if layout.subsampled:
        raise OptionError(
            f"UnitPrivacy: the program of silo {name!r} subsamples plate {layout.subsampled[0].name!r}; drop "
            "subsample_size and give sampling_rate, which is drawn in secret."
        )
    plates = [group.plate.name for group in layout.groups] or [plate.name for plate in layout.plates]
    if len(plates) != 1:
        what = f"units in several plates ({', '.join(plates)})" if plates else "no plate of units"
        raise OptionError(
            f"UnitPrivacy: the program of silo {name!r} has {what}, so who is protected cannot be told; put what "
            "belongs to one person into one plate, or use SiloPrivacy."
        )
    return plates[0]


def _rows(name, data, plate, plates_of):
    """The rows of units, where observations are outside their plate."""
    outside = {site: plates for site, plates in plates_of.items() if plate not in plates}
    if not outside:
        return None
    plates = set().union(*outside.values())
    odd = next((site for site in outside if site not in data.owners), None)
    if odd is not None or len(plates) != 1:
        raise OptionError(
            f"UnitPrivacy: in silo {name!r} the site {odd or min(outside)!r} belongs to no unit, so nobody's part in "
            "it can be bounded; put it into the units' plate, or use SiloPrivacy."
        )
    owner = np.asarray(data.owners[min(outside)]).ravel()
    size = next(each.size for each in data.program.layout.plates if each.name == plate)
    row_plate = plates.pop()
    if len(owner) != next(each.size for each in data.program.layout.plates if each.name == row_plate):
        raise OptionError(f"UnitPrivacy: in silo {name!r} the rows of site {min(outside)!r} are not a plain table.")
    if np.any(owner >= size):
        raise OptionError(
            f"UnitPrivacy: in silo {name!r} rows of site {min(outside)!r} belong to no unit; give each its own."
        )
    counts = np.bincount(owner, minlength=size)
    order, starts = np.argsort(owner, kind="stable"), np.cumsum(counts) - counts
    places = np.minimum(np.arange(counts.max())[None], np.maximum(counts - 1, 0)[:, None]) + starts[:, None]
    index = order[np.minimum(places, len(order) - 1)]
    return Rows(jnp.asarray(index, jnp.int32), jnp.asarray(counts, jnp.int32), row_plate)


def _numbers(data, rows, axes):
    if rows is None:
        return ()
    owner = np.empty(sum(np.asarray(rows.count)), int)
    for unit, (index, count) in enumerate(zip(np.asarray(rows.index), np.asarray(rows.count), strict=True)):
        owner[index[:count]] = unit
    return tuple(
        leaf
        for leaf, _, of_rows in axes
        if of_rows and data.values[leaf].ndim == 1 and np.array_equal(np.asarray(data.values[leaf]), owner)
    )


def _cut(shape, axis, of_rows, rows):
    if axis is None:
        return shape
    width = rows.index.shape[1] if of_rows and rows is not None else 1
    return (*shape[:axis], width, *shape[axis + 1 :])
