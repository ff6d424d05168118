"""A silo's variational parameters and their optimizer: start, select the drawn units, step, put back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import _optim
from .._types import Indices
from ..families import StructuredLocal
from ..model import SiloData


class LocalOptState(NamedTuple):
    """Optimizer states of the silo's own block and of each plate's units."""

    silo: Any
    units: dict[str, Any]


def build(make_block, data: SiloData, n_global: int, scale: float) -> StructuredLocal:
    """Make the family of a silo: the same start for every unit."""
    layout, dtype = data.program.layout, jnp.result_type(float)
    n_own = layout.own.size
    own = make_block(1, n_own, n_global, scale, dtype) if n_own else None
    units = {
        group.plate.name: make_block(group.plate.size, group.block, n_global + n_own, scale, dtype)
        for group in layout.groups
    }
    return StructuredLocal(own, units)


def init(optimizer: optax.GradientTransformation, family: StructuredLocal, data: SiloData) -> LocalOptState:
    """Start the optimizer; units of a minibatched plate get a state each."""
    minibatched = {plate.name for plate in data.program.layout.subsampled}
    own = None if family.silo is None else _optim.init(optimizer, family.silo)
    units = {
        plate: _optim.init(optimizer, block, per_unit=plate in minibatched) for plate, block in family.units.items()
    }
    return LocalOptState(own, units)


def select(family: StructuredLocal, indices: Indices) -> StructuredLocal:
    """Take the parameters of the drawn units only."""
    units = {
        plate: _take(block, indices[plate]) if plate in indices else block for plate, block in family.units.items()
    }
    return StructuredLocal(family.silo, units)


def ascend(
    optimizer: optax.GradientTransformation,
    family: StructuredLocal,
    opt_state: LocalOptState,
    gradient: StructuredLocal,
    indices: Indices,
) -> tuple[StructuredLocal, LocalOptState]:
    """Step uphill along the gradient of the drawn units; the others, and their optimizer states, stay untouched."""
    own, own_state = None, None
    if family.silo is not None:
        own, own_state = _optim.ascend(optimizer, gradient.silo, opt_state.silo, family.silo)
    units, states = {}, {}
    for plate, block in family.units.items():
        current = (block, opt_state.units[plate])
        drawn = indices.get(plate)
        rows, row_state = current if drawn is None else _take(current, drawn)
        stepped = _optim.ascend(optimizer, gradient.units[plate], row_state, rows, per_unit=drawn is not None)
        units[plate], states[plate] = stepped if drawn is None else _put(current, drawn, stepped)
    return StructuredLocal(own, units), LocalOptState(own_state, states)


def _take(tree, drawn):
    return jax.tree.map(lambda leaf: leaf[..., drawn], tree)


def _put(tree, drawn, rows):
    return jax.tree.map(lambda leaf, row: leaf.at[..., drawn].set(row, unique_indices=True), tree, rows)
