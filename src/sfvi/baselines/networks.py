"""Networks of the methods for classifying: layers of weights, with ReLU between them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._types import Key, Scalar

Layers = list[dict[str, Array]]


def init_layers(key: Key, widths: Sequence[int], *, biases: bool) -> Layers:
    r"""Weights from $U(-1/\sqrt{n}, 1/\sqrt{n})$, n the number of inputs: the usual start of a linear layer."""
    layers = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        weight_key, bias_key = jax.random.split(jax.random.fold_in(key, number))
        limit = inputs**-0.5
        layer = {"W": jax.random.uniform(weight_key, (inputs, outputs), minval=-limit, maxval=limit)}
        if biases:
            layer["b"] = jax.random.uniform(bias_key, (outputs,), minval=-limit, maxval=limit)
        layers.append(layer)
    return layers


def num_weights(widths: Sequence[int], *, biases: bool) -> int:
    """How many numbers such layers have."""
    return sum((inputs + biases) * outputs for inputs, outputs in pairwise(widths))


def linear(layer: dict[str, Any], x: Float[Array, "rows inputs"]) -> Float[Array, "rows outputs"]:
    """One layer."""
    return x @ layer["W"] + layer.get("b", 0.0)


def features(layers: Layers, x: Float[Array, "rows inputs"]) -> Float[Array, "rows outputs"]:
    """All layers, ReLU after each."""
    for layer in layers:
        x = jax.nn.relu(linear(layer, x))
    return x


def logits(layers: Layers, x: Float[Array, "rows inputs"]) -> Float[Array, "rows classes"]:
    """All layers, ReLU between them."""
    return linear(layers[-1], features(layers[:-1], x))


def log_likelihood(scores: Float[Array, "rows classes"], labels: Int[Array, " rows"]) -> Scalar:
    """Sum over rows of the log probability of their class."""
    return jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1))
