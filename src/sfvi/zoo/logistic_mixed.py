"""Logistic regression with a random intercept per child: the paper's six-cities model."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from ..model import StructuredModel


def population():
    r"""$\beta_k \sim N(0, 10^2)$ and $\omega \sim N(0, 10^2)$."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 10.0).expand([4]).to_event(1))
    omega = numpyro.sample("omega", dist.Normal(0.0, 10.0))
    return beta, omega


def silo(globals_, data):
    r"""$b_i \sim N(0, e^{-2\omega})$; child $i$ wheezes at age $t$ with logit $x_{it} \cdot \beta + b_i$."""
    beta, omega = globals_
    with numpyro.plate("children", data["x"].shape[0]):
        b = numpyro.sample("b", dist.Normal(0.0, jnp.exp(-omega)))
        logits = data["x"] @ beta + jnp.expand_dims(b, -1)
        numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=data["y"])


def logistic_mixed_model() -> StructuredModel:
    """Wheeze by mother's smoking, age and their product; data are `x` (children, ages, 4) and `y`."""
    coefficients = ["intercept", "smoke", "age", "smoke:age"]
    return StructuredModel(population, silo, dims={"beta": ["coefficient"]}, coords={"coefficient": coefficients})
