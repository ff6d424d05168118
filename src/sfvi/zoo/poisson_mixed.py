"""Poisson regression with a random intercept per unit."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from ..model import StructuredModel


def population():
    r"""$\beta_k \sim N(0, 5^2)$ and $\tau \sim \text{half-}N(2^2)$."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 5.0).expand([3]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    return beta, tau


def silo(globals_, data):
    r"""$b_i \sim N(0, \tau^2)$; counts have rate $e^{x_{it} \cdot \beta + b_i}$."""
    beta, tau = globals_
    with numpyro.plate("units", data["x"].shape[0]):
        b = numpyro.sample("b", dist.Normal(0.0, tau))
        rate = jnp.exp(data["x"] @ beta + jnp.expand_dims(b, -1))
        numpyro.sample("y", dist.Poisson(rate).to_event(1), obs=data["y"])


def poisson_mixed_model() -> StructuredModel:
    """Counts by three covariates; data are `x` (units, rows, 3) and `y`."""
    return StructuredModel(population, silo)


def simulate_poisson_mixed(num_units: int, num_rows: int = 4, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw data with beta = (0.3, -0.5, 0.4) and tau = 0.8; the first covariate is 1."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_units, num_rows, 3))
    x[..., 0] = 1.0
    b = 0.8 * generator.normal(size=num_units)
    return {"x": x, "y": generator.poisson(np.exp(x @ np.array([0.3, -0.5, 0.4]) + b[:, None]))}
