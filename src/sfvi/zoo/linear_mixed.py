"""Linear regression with a random intercept and a random slope per unit, correlated."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from ..model import StructuredModel


def population():
    r"""$\beta \sim N(0, 5^2)$, half-normal scales $\tau$ and $\sigma$, and a correlation, LKJ(2)."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(2.0).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    return beta, jnp.expand_dims(tau, -1) * root, sigma


def silo(globals_, data):
    r"""$u_i \sim N(0, \Sigma)$; $y_{it} \sim N(\beta_0 + u_{i0} + (\beta_1 + u_{i1}) x_{it}, \sigma^2)$."""
    beta, root, sigma = globals_
    with numpyro.plate("units", data["x"].shape[0]):
        u = numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(2), scale_tril=root))
        effects = beta + u
        mean = effects[..., 0:1] + effects[..., 1:2] * data["x"]
        numpyro.sample("y", dist.Normal(mean, sigma).to_event(1), obs=data["y"])


def linear_mixed_model() -> StructuredModel:
    """Outcomes by one covariate whose slope varies; data are `x` and `y` (units, rows)."""
    return StructuredModel(population, silo)


def simulate_linear_mixed(num_units: int, num_rows: int = 5, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw data with beta = (1, -0.5), tau = (0.8, 0.5), correlation 0.4 and sigma = 0.7."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_units, num_rows))
    covariance = np.array([[0.64, 0.16], [0.16, 0.25]])
    effects = np.array([1.0, -0.5]) + generator.multivariate_normal(np.zeros(2), covariance, size=num_units)
    y = effects[:, :1] + effects[:, 1:] * x + 0.7 * generator.normal(size=x.shape)
    return {"x": x, "y": y}
