"""A model whose messages have any size and whose work is next to nothing: what is measured is the engine."""

import os

import numpy as np
import numpyro
import numpyro.distributions as dist

import sfvi

FLOATS = int(os.environ.get("SFVI_BENCH_FLOATS", "5"))
SIZE = (FLOATS - 1) // 2  # a mean and a log sd each, and one theta


def population():
    """Many means."""
    return numpyro.sample("z", dist.Normal(0.0, 1.0).expand([SIZE]).to_event(1))


def silo(z, data):
    """A few numbers that know their sum."""
    sd = numpyro.param("sd", 1.0, constraint=dist.constraints.positive)
    numpyro.sample("y", dist.Normal(z.sum() / np.sqrt(SIZE), sd).expand(data["y"].shape).to_event(1), obs=data["y"])


def load(name):
    """A silo's numbers."""
    return {"y": np.random.default_rng(len(name)).normal(size=3)}


model = sfvi.StructuredModel(population, silo)
algorithm = sfvi.SFVI(global_family=sfvi.families.mean_field())
