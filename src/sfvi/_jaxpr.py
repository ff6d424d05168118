"""What a function computes, read off its operations: a hash to know it again, and what its results start from."""

import hashlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr


def fingerprint(function: Callable, *args: Any) -> str:
    """A hash of a function's operations and constants on arguments of these shapes; any change of one changes it."""
    closed = jax.make_jaxpr(function)(*args)
    text = re.sub(r" at 0x[0-9a-f]+", "", closed.jaxpr.pretty_print(use_color=False))  # a terminal has colors
    digest = hashlib.sha256(text.encode())
    for constant in _constants(closed):
        if not jnp.issubdtype(jnp.result_type(constant), jax.dtypes.prng_key):
            digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()


def dependence(function: Callable, *args: Any) -> list[list[bool]]:
    """For each result of a function that returns a list of arrays, which leaves of its arguments it starts from."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    number = len(jaxpr.outvars)
    return [dce_jaxpr(jaxpr, [index == position for index in range(number)])[1] for position in range(number)]


def _constants(closed):
    """Constants of a jaxpr and of those nested in it, such as jitted helpers."""
    yield from closed.consts
    for equation in closed.jaxpr.eqns:
        for param in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: isinstance(p, ClosedJaxpr)):
            if isinstance(param, ClosedJaxpr):
                yield from _constants(param)
