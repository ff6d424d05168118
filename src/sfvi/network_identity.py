"""By what an inference network on file is known again: its weights are saved, its computation is the user's code."""

from collections.abc import Callable
from typing import Any

import jax

from . import _jaxpr
from .algorithms.local_params import network_inputs, num_parents
from .algorithms.options import AbstractVariationalOptions
from .families import Amortized
from .families.amortized import one_unit
from .model import SiloData


def network_identity(local_family: Callable, silos: dict[str, SiloData]) -> dict[str, Any] | None:
    """What the network computes of one unit, to be kept in a file; it tells nothing of a silo but shapes of a unit."""
    if not isinstance(local_family, Amortized):
        return None
    options = AbstractVariationalOptions(local_family=local_family)
    for name, silo in silos.items():
        inputs = network_inputs(options, silo, {}, f"silo {name!r}")
        if inputs is not None:
            unit, parents = one_unit(inputs.values), num_parents(silo)
            computation = local_family.fingerprint(unit, parents)
            return {"unit": _encode(unit), "parents": parents, "computation": computation}
    return None


def same_network(local_family: Amortized, identity: dict[str, Any]) -> bool:
    """Whether a family's network computes what the network in a file did; True if the file cannot tell."""
    if identity.get("unit") is None:
        return True
    try:
        found = local_family.fingerprint(_decode(identity["unit"]), identity["parents"])
    except Exception:  # it cannot take such a unit
        return False
    return found == identity["computation"]


def inputs_identity(local_family: Callable, data: SiloData) -> str | None:
    """A hash of what `inputs` computes of data of these shapes; None without a network."""
    if not isinstance(local_family, Amortized):
        return None

    def inputs(values):
        return local_family.inputs(data.program.rebuild(values))

    try:
        return _jaxpr.fingerprint(inputs, data.values)
    except Exception as error:  # none that works on these data
        return f"fails: {type(error).__name__}"


def _encode(tree):
    """Abstract arrays in dicts, lists and tuples as JSON; None if there is anything else among them."""
    if isinstance(tree, jax.ShapeDtypeStruct):
        return {"shape": list(tree.shape), "dtype": str(tree.dtype)}
    if type(tree) not in (dict, list, tuple):
        return None
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    parts = [_encode(tree[key]) for key in keys]
    if None in parts or not all(isinstance(key, str | int) for key in keys):
        return None
    return {"kind": type(tree).__name__, "keys": keys, "parts": parts}


def _decode(encoded):
    if "shape" in encoded:
        return jax.ShapeDtypeStruct(tuple(encoded["shape"]), encoded["dtype"])
    parts = [_decode(part) for part in encoded["parts"]]
    if encoded["kind"] == "dict":
        return dict(zip(encoded["keys"], parts, strict=True))
    return tuple(parts) if encoded["kind"] == "tuple" else parts
