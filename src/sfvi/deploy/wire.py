r"""How numbers travel: precision, and replies with less than all of it.

A reply that loses something on the wire is sent as its difference from that of a silent silo, and what is lost is kept
in the silo and added to the next (error feedback), $\Delta_t = C(r_t - s_t + e_t)$, $e_{t+1} = r_t - s_t + e_t -
\Delta_t$: nothing is lost for good, so that sums over rounds stay right.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ..algorithms import FederatedAlgorithm
from ..errors import OptionError, WireError
from .codec import DTYPES, flatten, unflatten

PRECISIONS = ("float32", "float64", "bfloat16")
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wire:
    """The precision of floating point numbers on the wire.

    Args:
        broadcast: Of what the server sends: "float32", "float64" or "bfloat16". The last moves the parameters by up to
            0.4%: silos then see others than the server has.
        reply: Of what silos send.
        top_k: Send only this part of a reply's numbers, the largest; the rest waits. An experiment.
    """

    broadcast: str = "float32"
    reply: str = "float32"
    top_k: float | None = None

    def __post_init__(self):
        for name in ("broadcast", "reply"):
            if getattr(self, name) not in PRECISIONS:
                raise OptionError(f"wire: {name} is {getattr(self, name)!r}; choose one of {', '.join(PRECISIONS)}.")
        part = self.top_k
        if part is not None and (isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1):
            raise OptionError(f"wire: top_k is {part!r}; give a number above 0 and at most 1.")

    def check(self, algorithm: FederatedAlgorithm) -> None:
        """Refuse to squeeze the replies of an algorithm that cannot do without any of them."""
        if not algorithm.accumulates and (self.top_k is not None or self.reply == "bfloat16"):
            raise OptionError(
                "wire: replies of this algorithm must arrive as they are; leave top_k out and choose float32 or "
                "float64."
            )

    def loses(self, reply: Any) -> bool:
        """Whether replies of this kind arrive with less than they have."""
        return self.top_k is not None or any(
            leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > _size(self.reply)
            for leaf in jax.tree.leaves(reply)
        )


def pack(wire: Wire, reply: Tree, silent: Tree, residual: Any) -> tuple[dict[str, np.ndarray], Any]:
    """The arrays of a reply, and what is left over for the next; `residual` is None if nothing is ever left over."""
    if residual is None:
        return flatten(reply, prefix="reply", dtype=wire.reply), None
    vector, rebuild = ravel_pytree(jax.tree.map(lambda r, s: r - s, reply, silent))
    vector = np.asarray(vector + residual)
    if wire.top_k is None:
        arrays = flatten(rebuild(jnp.asarray(vector)), prefix="reply", dtype=wire.reply)
    else:
        count = max(1, round(wire.top_k * vector.size))
        index = np.sort(np.argsort(-np.abs(vector), kind="stable")[:count]).astype(np.uint32)
        arrays = {"index": index, **flatten(jnp.asarray(vector[index]), prefix="values", dtype=wire.reply)}
    sent, _ = ravel_pytree(_difference(wire, arrays, silent))
    return arrays, jnp.asarray(vector) - sent


def unpack(wire: Wire, arrays: dict[str, np.ndarray], silent: Tree, *, squeezed: bool) -> Tree:
    """The reply, as far as it arrived."""
    if not squeezed:
        return unflatten(silent, arrays, prefix="reply", dtype=wire.reply)
    return jax.tree.map(lambda s, d: s + d, silent, _difference(wire, arrays, silent))


def _difference(wire, arrays, silent):
    if wire.top_k is None:
        return unflatten(silent, arrays, prefix="reply", dtype=wire.reply)
    vector, rebuild = ravel_pytree(silent)
    count = max(1, round(wire.top_k * vector.size))
    like = {"values": jax.ShapeDtypeStruct((count,), vector.dtype)}
    index = arrays.get("index")
    if index is None or index.shape != (count,) or index.dtype != np.uint32 or np.any(np.diff(index.astype(int)) <= 0):
        raise WireError("A message does not fit: 'index' must be rising positions, as many as top_k says.")
    if index[-1] >= vector.size:
        raise WireError("A message does not fit: 'index' points beyond the reply.")
    rest = {f"['{name}']": array for name, array in arrays.items() if name != "index"}
    values = unflatten(like, rest, prefix="", dtype=wire.reply)["values"]
    return rebuild(jnp.zeros_like(vector).at[jnp.asarray(index)].set(values))


def _size(precision):
    return DTYPES[precision].itemsize
