"""The arrays of posteriors, as files hold them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import archive, families
from .._types import Theta
from ..errors import ArchiveError
from ..families import (
    AbstractGlobalFamily,
    Amortized,
    BlockGaussian,
    FullGaussian,
    LowRankGaussian,
    MeanFieldGaussian,
    StructuredLocal,
)
from ..network_identity import same_network

GLOBAL_FAMILIES = {f.__name__: f for f in (FullGaussian, LowRankGaussian, MeanFieldGaussian)}


def read_network(arrays: dict[str, Any], identity: Any, local_family: Callable | None, path: Any) -> PyTree:
    """The weights on file, if there are any: `local_family` must have the network that they belong to."""
    if (identity is not None) != isinstance(local_family, Amortized):
        found = "an amortized local family; give local_family=families.amortized(...) as in the fit."
        if identity is None:
            found = "no amortized local family; leave local_family out."
        raise ArchiveError(f"{str(path)!r} was made with {found}")
    if identity is None or not isinstance(local_family, Amortized):
        return None
    network = archive.unflatten(local_family.initial(), arrays, prefix="network", path=path)
    if not same_network(local_family, identity):
        raise ArchiveError(
            f"{str(path)!r} was made with an inference network that computes something else than that of local_family, "
            "or with another version of jax; give the families.amortized(...) of the fit."
        )
    return network


def flatten_theta(theta: Theta, *, prefix: str) -> tuple[dict[str, Any], list[list[str]]]:
    """Leaves by number, and where each belongs."""
    leaves = jax.tree.flatten_with_path(theta)[0]
    arrays = {f"{prefix}.{position}": leaf for position, (_, leaf) in enumerate(leaves)}
    return arrays, [[entry.key for entry in path] for path, _ in leaves]


def unflatten_theta(arrays: dict[str, Any], paths: Sequence[Sequence[str]], *, prefix: str) -> Theta:
    """Undo `flatten_theta`."""
    theta: dict = {}
    for position, path in enumerate(paths):
        branch = theta
        for entry in path[:-1]:
            branch = branch.setdefault(entry, {})
        branch[path[-1]] = jnp.asarray(arrays[f"{prefix}.{position}"])
    return theta


def read_family(arrays: dict[str, Any], header: Mapping[str, Any], path: Any) -> AbstractGlobalFamily:
    """A Gaussian is its arrays; a flow is built again from its settings and filled."""
    if "flow" in header:
        start = jnp.zeros(arrays["family.loc"].shape)
        return archive.unflatten(families.flow(**header["flow"])(start, 1.0), arrays, prefix="family", path=path)
    fields = {name[len("family.") :]: jnp.asarray(a) for name, a in arrays.items() if name.startswith("family.")}
    return GLOBAL_FAMILIES[header["family"]](**fields)


def flatten_local(family: StructuredLocal) -> dict[str, Any]:
    """Arrays of a silo's family; plates by number, since their names may hold anything."""
    parts = {"local.silo": family.silo} | {f"local.{i}": family.units[p] for i, p in enumerate(sorted(family.units))}
    arrays = {}
    for prefix, block in parts.items():
        arrays |= archive.flatten(block, prefix=prefix)
    return arrays


def read_local(arrays: dict[str, Any], plates: Sequence[str]) -> StructuredLocal:
    """Undo `flatten_local`."""

    def read(prefix):
        fields = ("loc", "log_scale", "lower", "coupling", "scale_coupling")
        found = {field: arrays.get(f"{prefix}.{field}") for field in fields}
        leaves: dict[str, Any] = {f: None if a is None else jnp.asarray(a) for f, a in found.items()}
        return BlockGaussian(**leaves)

    own = read("local.silo") if "local.silo.loc" in arrays else None
    return StructuredLocal(own, {plate: read(f"local.{i}") for i, plate in enumerate(plates)})
