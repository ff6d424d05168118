"""Array types by the names of the paper; `docs/notation.md` has the table."""

from typing import Any, TypeAlias

from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

Key: TypeAlias = PRNGKeyArray
Scalar: TypeAlias = Float[Array, ""]
GlobalVec: TypeAlias = Float[Array, " n_global"]
Theta: TypeAlias = dict[str, Any]  # name -> array, or tree of arrays, in unconstrained space
Data: TypeAlias = PyTree[Shaped[Array, "..."] | Any]
Indices: TypeAlias = dict[str, Shaped[Array, " n_drawn"]]  # subsampled plate -> drawn members
