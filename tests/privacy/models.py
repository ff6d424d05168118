"""Small models in which units are laid out in different ways."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import sfvi
from sfvi import bounds

from ..helpers import gamma_data, gamma_model, linear_data, linear_model


def visits_silo(globals_, data):
    """A row for each visit; whose it is says `child`. The silo has an intercept of its own."""
    mu, slope = globals_
    ours = numpyro.sample("ours", dist.Normal(0.0, 1.0))
    with numpyro.plate("children", data["age"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu + ours, 0.5))
    mean = b[data["child"]] + slope * data["x"] + 0.1 * data["age"][data["child"]]
    with numpyro.plate("visits", mean.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 0.4), obs=data["y"])


def two_globals():
    return numpyro.sample("mu", dist.Normal(0.0, 2.0)), numpyro.sample("slope", dist.Normal(0.0, 1.0))


def visits_data(n=7, seed=0):
    """Silos of one size have the same visits, so that they compile the same program."""
    generator = np.random.default_rng(n)
    child = generator.permutation(np.repeat(np.arange(n), generator.integers(1, 5, size=n)))
    generator = np.random.default_rng(seed)
    x = generator.normal(size=len(child))
    return {"child": child, "x": x, "y": 1 + x + generator.normal(size=len(x)), "age": generator.normal(size=n)}


def rows_silo(globals_, data):
    """Rows without latents, in a silo with an intercept of its own."""
    mu, slope = globals_
    ours = numpyro.sample("ours", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", data["x"].shape[0]):
        numpyro.sample("y", dist.Normal(mu + ours + slope * data["x"], 1.0), obs=data["y"])


def plain_silo(globals_, data):
    """Rows and nothing else."""
    mu, slope = globals_
    with numpyro.plate("rows", data["x"].shape[0]):
        numpyro.sample("y", dist.Normal(mu + slope * data["x"], 1.0), obs=data["y"])


def rows_data(n=9, seed=0):
    generator = np.random.default_rng(seed)
    return {"x": generator.normal(size=n), "y": generator.normal(size=n)}


def centred_silo(globals_, data):
    """Takes a mean over all units, so that nobody's part can be told from the others'."""
    mu, slope = globals_
    with numpyro.plate("rows", data["x"].shape[0]):
        x = data["x"] - jnp.mean(data["x"])
        numpyro.sample("y", dist.Normal(mu + slope * x, 1.0), obs=data["y"])


def outside_silo(globals_, data):
    mu, _ = globals_
    with numpyro.plate("rows", data["x"].shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=data["y"])
    numpyro.sample("total", dist.Normal(mu, 1.0), obs=jnp.sum(data["x"]))


def subsampled_silo(globals_, data):
    mu, _ = globals_
    with numpyro.plate("rows", data["x"].shape[0], subsample_size=3) as index:
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=data["y"][index])


def model(silo):
    return sfvi.StructuredModel(two_globals, silo)


LAYOUTS = {
    "units in a plate": (gamma_model, gamma_data, bounds.elbo()),
    "several numbers of a unit": (linear_model, linear_data, bounds.locally_enhanced(3)),
    "a table of visits": (lambda: model(visits_silo), visits_data, bounds.locally_enhanced(3)),
    "rows only": (lambda: model(rows_silo), rows_data, bounds.elbo()),
}
