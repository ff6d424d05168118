"""What models of silos with features and classes have in common: `{"x": features, one row each, "y": classes}`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpyro

from ..errors import DataError


@contextmanager
def rows_of(data: Any, num_features: int, batch_size: int | None) -> Iterator[tuple[Any, Any]]:
    """The plate `rows` of a silo, and features and classes of those that are drawn; None draws all."""
    x, y = jnp.asarray(data["x"]), jnp.asarray(data["y"])
    if x.ndim != 2 or x.shape[1] != num_features:
        raise DataError(f"x has the shape {x.shape}; give a row of num_features = {num_features} numbers for each.")
    if y.shape != x.shape[:1] or not jnp.issubdtype(y.dtype, jnp.integer):
        raise DataError(
            f"y has the shape {y.shape} and the type {y.dtype}; give a class for each of {len(x)} rows, whole numbers."
        )
    drawn = len(x) if batch_size is None else min(batch_size, len(x))
    with numpyro.plate("rows", len(x), subsample_size=drawn) as rows:
        yield (x, y) if drawn == len(x) else (x[rows], y[rows])
