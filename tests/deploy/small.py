"""A model that compiles fast, and options that only code can hold."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import sfvi
from sfvi.deploy import SiloInput

SIZES = {"a": 5, "b": 5, "c": 5}  # equal, so that they compile the same program


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 3.0).expand([2]).to_event(1))


def silo(mu, data):
    spread = numpyro.param("spread", 1.0, constraint=dist.constraints.positive)
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu[0], spread))
        numpyro.sample("y", dist.Normal(b + mu[1], 0.5), obs=data["y"])


def observations(name):
    number = sorted(SIZES).index(name)
    return {"y": np.random.default_rng(number).normal(1.0 + number, 1.0, SIZES[name])}


def load(name):
    return SiloInput(observations(name))


model = sfvi.StructuredModel(population, silo)
half = sfvi.SFVI(participation=sfvi.participation.count(2))
half_of_sites = sfvi.Sites(participation=sfvi.participation.count(2), num_local_steps=20)
not_options = 3
most = sfvi.SFVI(participation=sfvi.participation.count(2), optimizer=optax.sgd(0.01))
averages = sfvi.SFVIAvg(num_local_steps=5, weights="units", global_family=sfvi.families.mean_field())
averages_with_noise = sfvi.SFVIAvg(
    num_local_steps=5,
    global_family=sfvi.families.mean_field(),
    privacy=sfvi.SiloPrivacy(noise_multiplier=3.0, clip=1.0, shared_by=3),
)
ruled_with_noise = sfvi.SFVI(
    participation=sfvi.participation.rule(lambda key, number, n: (jnp.ones(n, bool), jnp.linspace(0.5, 1.0, n))),
    privacy=sfvi.UnitPrivacy(noise_multiplier=3.0, clip=1.0, shared_by=3),
)
