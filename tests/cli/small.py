"""A model that is named on the command line, and its silos."""

import numpy as np
import numpyro
import numpyro.distributions as dist

import sfvi

Y = np.random.default_rng(3).normal(1.0, 1.4, 30)


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 2.0))


def silo(mu, data):
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(b, 1.0), obs=data["y"])


model = sfvi.StructuredModel(population, silo)
options = sfvi.SFVI(bound=sfvi.bounds.elbo())


def load(name):
    return {"y": Y[:12] if name == "north" else Y[12:]}


def nothing(name):
    raise RuntimeError("the disk is gone")
