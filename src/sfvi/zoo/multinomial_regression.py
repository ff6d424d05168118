r"""Multinomial regression with learned prior scales: the paper's empirical-Bayes model of MNIST.

$$W_{ck} \sim \mathcal{N}(0, \sigma_W^2), \qquad b_c \sim \mathcal{N}(0, \sigma_b^2), \qquad
  y_i \mid W, b \sim \mathrm{Categorical}(\mathrm{softmax}(W x_i + b))$$

$\theta = (\log \sigma_W, \log \sigma_b)$ is learned; nothing is local.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from ..model import StructuredModel
from .labelled import rows_of
from .options import check_sizes


def multinomial_regression(
    *,
    num_features: int = 784,
    num_classes: int = 10,
    batch_size: int | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    learn_scales: bool = True,
) -> StructuredModel:
    r"""The model of silos that hold `{"x": features, one row each, "y": classes}`.

    Args:
        num_features: Length of $x_i$.
        num_classes: Number of classes.
        batch_size: Rows of a silo in one step; None for all.
        scales: $(\sigma_W, \sigma_b)$, or where they start if they are learned.
        learn_scales: Whether they are parameters $\theta$, `sigma_W` and `sigma_b`.
    """
    sizes = {"num_features": num_features, "num_classes": num_classes, "batch_size": batch_size}
    check_sizes("multinomial_regression", **sizes)

    def scale(name, value):
        return numpyro.param(name, value, constraint=constraints.positive) if learn_scales else value

    def population():
        shape = [num_classes, num_features]
        weights = numpyro.sample("W", dist.Normal(0.0, scale("sigma_W", scales[0])).expand(shape).to_event(2))
        bias = numpyro.sample("b", dist.Normal(0.0, scale("sigma_b", scales[1])).expand([num_classes]).to_event(1))
        return weights, bias

    def silo(globals_, data):
        weights, bias = globals_
        with rows_of(data, num_features, batch_size) as (x, y):
            logits = jnp.asarray(x, weights.dtype) @ weights.T + bias
            numpyro.sample("y", dist.CategoricalLogits(logits), obs=y)

    return StructuredModel(population, silo)
