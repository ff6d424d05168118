"""Where each site lies: the shapes and plates read off one abstract run of a program."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..errors import ModelError
from ..families import Local


class Frame(NamedTuple):
    """A plate around a site: its name and the (negative) batch dimension it occupies."""

    name: str
    dim: int


class Plate(NamedTuple):
    """A plate of the program: members, and how many of them one evaluation draws."""

    name: str
    size: int
    drawn: int


class Site(NamedTuple):
    """A latent site: its value's shape, free shape, number of batch dimensions and plates, outermost first."""

    name: str
    shape: tuple[int, ...]
    free_shape: tuple[int, ...]
    batch_ndim: int
    frames: tuple[Frame, ...]

    @property
    def free_size(self) -> int:
        """Number of unconstrained numbers."""
        return math.prod(self.free_shape)

    def unit_axis(self, plate: str) -> int:
        """The axis of the free value that counts the members of `plate`."""
        dim = next(frame.dim for frame in self.frames if frame.name == plate)
        return self.batch_ndim + dim


class FlatLayout(NamedTuple):
    """Sites laid end to end in one vector."""

    sites: tuple[Site, ...]

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(site.free_size for site in self.sites)

    def split(self, vector: Float[Array, " n"]) -> dict[str, Array]:
        """Cut the vector into the sites' unconstrained values."""
        values, start = {}, 0
        for site in self.sites:
            values[site.name] = vector[start : start + site.free_size].reshape(site.free_shape)
            start += site.free_size
        return values

    def join(self, values: dict[str, Array]) -> Float[Array, " n"]:
        """Undo `split`."""
        if not self.sites:
            return jnp.zeros(0)
        return jnp.concatenate([jnp.ravel(values[site.name]) for site in self.sites])


class UnitGroup(NamedTuple):
    """The sites whose values come one block per member of a plate."""

    plate: Plate
    sites: tuple[Site, ...]

    @property
    def block(self) -> int:
        """Unconstrained numbers per unit."""
        return sum(site.free_size for site in self.sites) // self.plate.drawn

    def split(self, blocks: Float[Array, "block units"]) -> dict[str, Array]:
        """Cut the units' blocks into the sites' unconstrained values."""
        values, start = {}, 0
        for site in self.sites:
            axis = site.unit_axis(self.plate.name)
            rest = site.free_shape[:axis] + site.free_shape[axis + 1 :]
            width = math.prod(rest)
            rows = blocks[start : start + width].reshape(*rest, blocks.shape[1])
            values[site.name] = jnp.moveaxis(rows, -1, axis)
            start += width
        return values

    def join(self, values: dict[str, Array]) -> Float[Array, "block units"]:
        """Undo `split`."""
        rows = [jnp.moveaxis(values[site.name], site.unit_axis(self.plate.name), -1) for site in self.sites]
        return jnp.concatenate([row.reshape(-1, row.shape[-1]) for row in rows])


class LocalLayout(NamedTuple):
    """The local latents of a silo and all plates of its program."""

    own: FlatLayout
    groups: tuple[UnitGroup, ...]
    plates: tuple[Plate, ...]

    def split(self, z_local: Local) -> dict[str, Array]:
        """Cut a silo's latents into the sites' unconstrained values."""
        values = {}
        if z_local.silo is not None:
            values |= self.own.split(z_local.silo[:, 0])
        for group in self.groups:
            values |= group.split(z_local.units[group.plate.name])
        return values

    def join(self, values: dict[str, Array]) -> Local:
        """Undo `split`."""
        own = self.own.join(values)[:, None] if self.own.size else None
        return Local(own, {group.plate.name: group.join(values) for group in self.groups})

    @property
    def num_units(self) -> int | None:
        """How many exchangeable units carry latents and data of their own, or None if that cannot be told.

        Members of the plate that holds the latents, or the observations if there are no latents; one, the silo itself,
        if it has latents outside any plate.
        """
        if self.own.size:
            return 1
        plates = [group.plate for group in self.groups] or list(self.plates)
        return plates[0].size if len(plates) == 1 else None

    @property
    def subsampled(self) -> tuple[Plate, ...]:
        """Plates of which one evaluation draws only a part."""
        return tuple(plate for plate in self.plates if plate.drawn < plate.size)


def group_units(sites: Sequence[Site], plates: Sequence[Plate]) -> LocalLayout:
    """Find the units: sites that share plates belong to the members of the outermost plate they all have.

    Sites in crossed plates with none in common are kept apart, each by its own outermost plate.
    """
    by_name = {plate.name: plate for plate in plates}
    own = tuple(site for site in sites if not site.frames)
    grouped: dict[str, list[Site]] = {}
    for family in _connected([site for site in sites if site.frames]):
        common = set.intersection(*({f.name for f in site.frames} for site in family))
        for site in family:
            names = [frame.name for frame in site.frames]
            unit = next((name for name in names if name in common), names[0])
            grouped.setdefault(unit, []).append(site)
            for name in names:
                if name != unit and by_name[name].drawn < by_name[name].size:
                    raise ModelError(
                        f"Plate {name!r} is subsampled inside plate {unit!r}, which holds the latent "
                        f"{site.name!r}; subsample {unit!r} instead, or neither."
                    )
    groups = tuple(UnitGroup(by_name[name], tuple(group)) for name, group in grouped.items())
    return LocalLayout(FlatLayout(own), groups, tuple(plates))


def _connected(sites):
    """Partition the sites so that any two which share a plate are together."""
    families: list[list[Site]] = []
    for site in sites:
        names = {frame.name for frame in site.frames}
        touching = [f for f in families if any(names & {p.name for p in s.frames} for s in f)]
        merged = [s for family in touching for s in family] + [site]
        families = [f for f in families if f not in touching] + [merged]
    return families
