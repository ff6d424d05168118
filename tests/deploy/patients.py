"""A model whose data would be known again anywhere: no two numbers alike, ids that nobody else has."""

import numpy as np
import numpyro
import numpyro.distributions as dist

import sfvi
from sfvi.deploy import SiloInput


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 3.0)), numpyro.sample("slope", dist.Normal(0.0, 1.0))


def silo(globals_, data):
    mu, slope = globals_
    with numpyro.plate("patients", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(b + slope * data["x"], 0.5), obs=data["y"])


def load(name):
    generator = np.random.default_rng(sum(name.encode()))
    x, y = generator.normal(size=(2, 23)) * 3.7
    return SiloInput({"x": x, "y": y}, generator.integers(10**8, 2**31, size=23))


model = sfvi.StructuredModel(population, silo)
