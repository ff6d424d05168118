"""A silo's variational parameters and their optimizer: start, select the drawn units, step, put back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .. import _optim
from .._types import Indices
from ..errors import OptionError
from ..families import Amortized, AmortizedBlock, BlockGaussian, StructuredLocal
from ..model import SiloData
from .options import AbstractVariationalOptions

A_SILO = "a silo"  # in messages, where its name is not known


class LocalOptState(NamedTuple):
    """Optimizer states of the silo's own block and of each plate's units."""

    silo: Any
    units: dict[str, Any]


class NetworkInputs(NamedTuple):
    """What an inference network sees: the plate it serves, the units' data (units first), latents per unit."""

    plate: str
    values: PyTree
    size: int


def build(options: AbstractVariationalOptions, data: SiloData, n_global: int) -> StructuredLocal:
    """Make the free family of a silo: the same start for every unit; none where a network serves."""
    layout, dtype = data.program.layout, jnp.result_type(float)
    n_own, scale = layout.own.size, options.init_scale
    inputs = network_inputs(options, data, {})
    if inputs is not None:
        check_network(options, inputs, data, A_SILO)

    def block(units, size, n_parent):
        built = options.local_family(units, size, n_parent, scale, dtype)
        if not isinstance(built, BlockGaussian):
            raise OptionError(
                f"local_family returns {built!r}; give what families.block() returns, or a function of (units, size, "
                "parent, scale, dtype) that returns a BlockGaussian."
            )
        return built

    own = block(1, n_own, n_global) if n_own else None
    units: dict[str, BlockGaussian | AmortizedBlock] = {
        group.plate.name: block(group.plate.size, group.block, n_global + n_own)
        for group in layout.groups
        if inputs is None or group.plate.name != inputs.plate
    }
    return StructuredLocal(own, units)


def network_inputs(
    options: AbstractVariationalOptions, data: SiloData, indices: Indices, who: str = A_SILO
) -> NetworkInputs | None:
    """The data of the drawn units that an inference network serves; None if there is none. `who` is for messages."""
    chosen, groups = options.local_family, data.program.layout.groups
    if not isinstance(chosen, Amortized):
        return None
    plate = chosen.plate_of(who, [group.plate.name for group in groups])
    if plate is None:
        return None
    group = next(group for group in groups if group.plate.name == plate)
    values = chosen.select_inputs(who, data.program.rebuild(data.values), group.plate.size)
    if plate in indices:
        values = jax.tree.map(lambda leaf: leaf[indices[plate]], values)
    return NetworkInputs(plate, values, group.block)


def check_network(options: AbstractVariationalOptions, inputs: NetworkInputs, data: SiloData, who: str) -> None:
    """Refuse a network that cannot take these inputs or returns something else than a unit's parameters."""
    assert isinstance(options.local_family, Amortized)
    options.local_family.check(who, inputs.values, inputs.size, num_parents(data))


def num_parents(data: SiloData) -> int:
    """How many latents the units of a silo follow: the global ones and the silo's own."""
    return data.program.population.layout.size + data.program.layout.own.size


def complete(
    options: AbstractVariationalOptions, free: StructuredLocal, network: PyTree, inputs: NetworkInputs | None
) -> StructuredLocal:
    """Add the blocks that the inference network gives to the free ones."""
    if inputs is None or not isinstance(options.local_family, Amortized):
        return free
    served = options.local_family.build(network, inputs.values, inputs.size)
    return StructuredLocal(free.silo, free.units | {inputs.plate: served})


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
