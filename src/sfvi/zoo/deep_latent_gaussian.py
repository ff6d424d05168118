r"""Deep latent Gaussian model of binary images, a variational autoencoder over silos.

$$z_i \sim \mathcal{N}(0, I), \qquad x_{ik} \mid z_i \sim \mathrm{Bernoulli}(\mathrm{logit}^{-1}(d_w(z_i))_k)$$

The decoder's weights $w$ are trainable parameters $\theta$, as in a VAE, or global latents with normal priors; the
encoder is an inference network for `families.amortized`.
"""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from .._random import as_key
from .._types import Key
from ..errors import OptionError
from ..families import Amortized, amortized
from ..model import StructuredModel

PIXELS = 784


def deep_latent_gaussian(
    *,
    decoder: Literal["parameters", "latents"] = "parameters",
    num_latents: int = 16,
    num_hidden: int = 200,
    batch_size: int | None = 100,
    seed: int = 0,
) -> StructuredModel:
    r"""The model of silos that hold `{"x": binary images, one row each}`.

    Args:
        decoder: What the decoder's weights are: "parameters", $\theta$, or "latents", part of $z_G$. Latents must not
            start at zero, where all units of a layer are alike: choose `init_loc_fn=init_to_sample`.
        num_latents: Dimension of $z_i$.
        num_hidden: Width of the decoder's hidden layer.
        batch_size: Images of a silo in one step; None for all.
        seed: Of the weights' start.
    """
    if decoder not in ("parameters", "latents"):
        raise OptionError(f"deep_latent_gaussian: decoder is {decoder!r}; choose 'parameters' or 'latents'.")
    shapes = {
        "hidden": (num_latents, num_hidden),
        "hidden_bias": (num_hidden,),
        "pixels": (num_hidden, PIXELS),
        "pixels_bias": (PIXELS,),
    }

    def population():
        if decoder == "parameters":
            return {name: numpyro.param(name, value) for name, value in _initial_weights(shapes, seed).items()}
        # Priors that keep every layer's outputs of the size of its inputs.
        return {
            name: numpyro.sample(name, dist.Normal(0.0, _fan_in(shape) ** -0.5).expand(shape).to_event(len(shape)))
            for name, shape in shapes.items()
        }

    def silo(weights, data):
        x = data["x"]
        drawn = x.shape[0] if batch_size is None else min(batch_size, x.shape[0])
        with numpyro.plate("images", x.shape[0], subsample_size=drawn) as rows:
            z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([num_latents]).to_event(1))
            logits = _decode(weights, z)
            numpyro.deterministic("image", jax.nn.sigmoid(logits))
            numpyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=x[rows].astype(logits.dtype))

    return StructuredModel(population, silo)


def image_encoder(
    key: Key | int, *, num_latents: int = 16, num_hidden: int = 200, activation: Callable = jax.nn.relu
) -> Amortized:
    """The inference network to go with it: image to means and log scales."""
    key = as_key(key)
    network = eqx.nn.MLP(PIXELS, 2 * num_latents, num_hidden, 1, activation=activation, key=key)
    return amortized(network, _images, plate="images")


def _images(data: Any) -> jax.Array:
    return data["x"]


def _decode(weights, z):
    hidden = jax.nn.relu(z @ weights["hidden"] + weights["hidden_bias"])
    return hidden @ weights["pixels"] + weights["pixels_bias"]


def _initial_weights(shapes, seed):
    generator = np.random.default_rng(seed)
    return {
        name: jnp.asarray(
            _fan_in(shape) ** -0.5 * generator.normal(size=shape) * (len(shape) > 1), jnp.result_type(float)
        )
        for name, shape in shapes.items()
    }


def _fan_in(shape):
    return shape[0] if len(shape) > 1 else 1
