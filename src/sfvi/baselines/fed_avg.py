"""Federated averaging of point estimates (McMahan et al. 2017)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import _optim
from .._random import as_key
from .._types import Key, Scalar
from ..errors import OptionError
from .stacking import stack


def fed_avg(
    loss: Callable[[Any, Any], Scalar],
    params: Any,
    silos: Mapping[str, Any],
    *,
    key: Key | int,
    num_rounds: int,
    num_local_steps: int,
    batch_size: int,
    optimizer: optax.GradientTransformation,
    callback: Callable[[int], None] = lambda number: None,
) -> Any:
    r"""Every silo descends its own loss from the average; the average weights silos by their rows.

    $$w \leftarrow \sum_j \frac{n_j}{n} w_j, \qquad w_j = \text{m steps on } \ell(\cdot, \text{batches of silo } j)
      \text{ from } w$$

    Args:
        loss: Of parameters and a batch, a mean over its rows.
        params: Where to start, a tree of arrays.
        silos: Data by name: trees of arrays with the rows on the first axis.
        key: Of the batches, drawn with replacement.
        num_rounds: Exchanges.
        num_local_steps: m.
        batch_size: Rows of a batch.
        optimizer: Of the silos; its state begins anew in every round.
        callback: Called with the number of rounds done.
    """
    for name, value in (("num_rounds", num_rounds), ("num_local_steps", num_local_steps), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"fed_avg: {name} is {value!r}; give a whole number of at least 1.")
    stacked = stack("fed_avg", silos)
    rows = np.asarray(stacked.rows)
    weights = jnp.asarray(rows / rows.sum(), jnp.result_type(float))

    def local(params, key, data, num_rows):
        def step(carry, key):
            params, state = carry
            chosen = jax.random.randint(key, (batch_size,), 0, num_rows)
            batch = jax.tree.map(lambda leaf: leaf[chosen], data)
            uphill = jax.grad(lambda params: -loss(params, batch))(params)
            return _optim.ascend(optimizer, uphill, state, params), None

        start = (params, _optim.init(optimizer, params))
        return jax.lax.scan(step, start, jax.random.split(key, num_local_steps))[0][0]

    @jax.jit
    def one_round(params, key, data, num_rows):
        keys = jax.random.split(key, len(num_rows))
        found = jax.vmap(local, (None, 0, 0, 0))(params, keys, data, num_rows)
        return jax.tree.map(lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, 1), found)

    key = as_key(key)
    for number in range(num_rounds):
        params = one_round(params, jax.random.fold_in(key, number), stacked.data, stacked.rows)
        callback(number + 1)
    return params
