r"""Bayesian neural networks for silos that differ: the paper's hierarchical network, and FedPop in full.

Both classify $x$ by $\mathrm{softmax}(f_j(x))$ with $f_j(x) = h W^{(2,j)}$, $h = \mathrm{ReLU}(x W^{(1,j)})$ and no
biases; they differ in what silos share. Networks have many latents, and all units of a layer are alike where all
weights are zero, so fit them with mean-field families from a random start: `families_for_networks`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from numbers import Real
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from .. import families
from ..errors import OptionError
from ..model import StructuredModel
from .labelled import rows_of
from .options import check_sizes

Widths = Sequence[int]
RADIUS = 0.1  # where weights start


def families_for_networks(*, init_scale: float = 0.05) -> dict[str, Any]:
    """Options of SFVI, SFVI-Avg and Sites to fit networks with: `SFVI(**families_for_networks())`.

    Mean field, since with the default a silo's weights would follow all global ones, with a number for each pair; and
    a random start, since all units of a layer are alike where all weights are zero.

    Args:
        init_scale: Standard deviation of all weights at the start.
    """
    random: Any = init_to_uniform
    return {
        "global_family": families.mean_field(),
        "local_family": families.block(coupling="none"),
        "init_loc_fn": partial(random, radius=RADIUS),
        "init_scale": init_scale,
    }


def hierarchical_bnn(
    *,
    num_features: int = 784,
    num_classes: int = 10,
    width: int = 64,
    personal: Widths | Mapping[str, Widths] = (),
    scale: Literal["scalar", "elementwise"] = "scalar",
    batch_size: int | None = None,
    power: float = 1.0,
) -> StructuredModel:
    r"""A first layer of each silo's own, around one that all share; what follows it is personal.

    $$\mu_{ik} \sim \mathcal{N}(0, 1), \quad \sigma \sim \mathcal{N}_+(0, 1), \quad
      \epsilon^{(j)}_{ik}, W^{(2,j)}_{kc} \sim \mathcal{N}(0, 1), \quad W^{(1,j)} = \mu + \sigma \epsilon^{(j)}$$

    Silos hold `{"x": features, one row each, "y": classes}`; the site `probabilities` is what they predict. Fit it
    with `families_for_networks`.

    Args:
        num_features: Length of $x$.
        num_classes: Number of classes.
        width: Of the first layer, which is shared.
        personal: Widths of further hidden layers, which are personal. By silo name if silos have different networks.
        scale: Whether $\sigma$ is one number or one for each weight.
        batch_size: Rows of a silo in one step; None for all.
        power: Of the likelihood. Above 1 every row counts that often, as if the KL term of the ELBO had the weight
            1 / power: a "cold" posterior (Wenzel et al. 2020), which is none, but less cautious.
    """
    if scale not in ("scalar", "elementwise"):
        raise OptionError(f"hierarchical_bnn: scale is {scale!r}; choose 'scalar' or 'elementwise'.")
    _check_power("hierarchical_bnn", power)
    sizes = {"num_features": num_features, "num_classes": num_classes, "width": width, "batch_size": batch_size}
    check_sizes("hierarchical_bnn", **sizes)
    for name, hidden in personal.items() if isinstance(personal, Mapping) else [("", personal)]:
        _check_widths("hierarchical_bnn", f"personal[{name!r}]" if name else "personal", hidden, at_least=0)
    if isinstance(personal, Mapping) and not personal:
        raise OptionError("hierarchical_bnn: personal names no silo; give the widths of each, or of all.")
    shape = (num_features, width)

    def population():
        mu = numpyro.sample("mu", _normal(shape))
        spread = dist.HalfNormal(1.0)
        sigma = numpyro.sample("sigma", spread if scale == "scalar" else spread.expand(shape).to_event(2))
        return mu, sigma

    def program(hidden):
        def silo(globals_, data):
            mu, sigma = globals_
            layers = [mu + sigma * numpyro.sample("epsilon", _normal(shape))]
            for number, sizes in enumerate(pairwise([width, *hidden, num_classes]), start=2):
                layers.append(numpyro.sample(f"W{number}", _normal(sizes)))
            classify(layers, data, num_features, batch_size, power)

        return silo

    if isinstance(personal, Mapping):
        return StructuredModel(population, {name: program(hidden) for name, hidden in personal.items()})
    return StructuredModel(population, program(personal))


def fed_pop(
    *,
    num_features: int = 784,
    num_classes: int = 10,
    hidden: Widths = (64,),
    batch_size: int | None = None,
    power: float = 1.0,
) -> StructuredModel:
    r"""FedPop (Kotelevskii et al. 2022) with a posterior for all of it: shared layers, and a personal head.

    $$W^{(1)}_{ik} \sim \mathcal{N}(0, 1), \quad \mu_{kc} \sim \mathcal{N}(0, 1), \quad
      \sigma_{kc} \sim \mathcal{N}_+(0, 1), \quad W^{(2,j)}_{kc} \sim \mathcal{N}(\mu_{kc}, \sigma_{kc}^2)$$

    Silos hold `{"x": features, one row each, "y": classes}`; the site `probabilities` is what they predict. Fit it
    with `families_for_networks`.

    Args:
        num_features: Length of $x$.
        num_classes: Number of classes.
        hidden: Widths of the hidden layers, all of them shared.
        batch_size: Rows of a silo in one step; None for all.
        power: Of the likelihood. Above 1 every row counts that often, as if the KL term of the ELBO had the weight
            1 / power: a "cold" posterior (Wenzel et al. 2020), which is none, but less cautious.
    """
    _check_power("fed_pop", power)
    check_sizes("fed_pop", num_features=num_features, num_classes=num_classes, batch_size=batch_size)
    _check_widths("fed_pop", "hidden", hidden, at_least=1)
    head = (hidden[-1], num_classes)

    def population():
        shapes = pairwise([num_features, *hidden])
        layers = [numpyro.sample(f"W{number}", _normal(sizes)) for number, sizes in enumerate(shapes, start=1)]
        mu = numpyro.sample("mu", _normal(head))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0).expand(head).to_event(2))
        return layers, mu, sigma

    def silo(globals_, data):
        layers, mu, sigma = globals_
        own = numpyro.sample("head", dist.Normal(mu, sigma).to_event(2))
        classify([*layers, own], data, num_features, batch_size, power)

    return StructuredModel(population, silo)


def classify(layers: Sequence[Any], data: Any, num_features: int, batch_size: int | None, power: float) -> None:
    """Observe classes through a network with ReLU between its layers; the site `probabilities` is what it predicts."""
    with rows_of(data, num_features, batch_size) as (x, y):
        values = jnp.asarray(x, layers[0].dtype)
        for layer in layers[:-1]:
            values = jax.nn.relu(values @ layer)
        logits = values @ layers[-1]
        numpyro.deterministic("probabilities", jax.nn.softmax(logits))
        with numpyro.handlers.scale(scale=power):
            numpyro.sample("y", dist.CategoricalLogits(logits), obs=y)


def _normal(shape):
    return dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape))


def _check_power(model, power):
    if isinstance(power, bool) or not isinstance(power, Real) or not 0 < float(power) < float("inf"):
        raise OptionError(f"{model}: power is {power!r}; give a positive number, 1 for the posterior.")


def _check_widths(model, option, widths, *, at_least):
    if isinstance(widths, str) or not isinstance(widths, Sequence) or len(widths) < at_least:
        what = "a sequence of widths" + (f", at least {at_least}" if at_least else "")
        raise OptionError(f"{model}: {option} is {widths!r}; give {what}, like (64,).")
    check_sizes(model, **{f"{option}[{position}]": width for position, width in enumerate(widths)})
