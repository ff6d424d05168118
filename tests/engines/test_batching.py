"""However silos are computed together, they give what each would give alone."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import sfvi
from sfvi.engines import batching, loop

from ..helpers import assert_trees_close, bind, gamma_data, gamma_model, run_batched, run_one_by_one

KEY = jax.random.key(7)
SIZES = {"a": 5, "b": 1, "c": 5, "d": 6}


@pytest.fixture(autouse=True)
def _compile_fast():
    """These tests compile a lot and compute little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 1.0)), numpyro.sample("tau", dist.HalfNormal(1.0))


def with_own_latent(globals_, data):
    mu, tau = globals_
    level = numpyro.sample("level", dist.Normal(mu, tau))
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(level, 1.0))
        numpyro.sample("y", dist.Normal(b, 0.5), obs=data["y"])


def minibatched(globals_, data):
    mu, tau = globals_
    with numpyro.plate("units", data["y"].shape[0], subsample_size=min(2, data["y"].shape[0])) as chosen:
        b = numpyro.sample("b", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(b, 0.5), obs=data["y"][chosen])


def long_format(globals_, data):
    mu, tau = globals_
    with numpyro.plate("units", data["size"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, tau))
    with numpyro.plate("rows", data["y"].shape[0]):
        numpyro.sample("y", dist.Normal(b[data["unit"]], 0.5), obs=data["y"])


def centres_its_data(globals_, data):
    mu, tau = globals_
    centred = data["y"] - data["y"].mean()
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(b, 0.5), obs=centred)


def knows_its_size(globals_, data):
    mu, tau = globals_
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, tau / jnp.sqrt(data["y"].shape[0])))
        numpyro.sample("y", dist.Normal(b, 0.5), obs=data["y"])


def simple_data(sizes=SIZES):
    generator = np.random.default_rng(0)
    return {name: {"y": generator.normal(1.0, 1.0, size=n)} for name, n in sizes.items()}


def long_data():
    generator = np.random.default_rng(0)
    silos = {}
    for name, n in SIZES.items():
        unit = np.repeat(np.arange(n), 2)
        silos[name] = {"y": generator.normal(size=2 * n), "unit": unit, "size": np.ones(n)}
    return silos


def large(silos):
    return {name: data for name, data in silos.items() if len(data["y"]) > 1}


CASES = {  # model, silos, kinds of batches with merging, and without
    "plain": (gamma_model, {n: gamma_data(k, seed=k) for n, k in SIZES.items()}, ["merged"], None),
    "own latents": (lambda: sfvi.StructuredModel(population, with_own_latent), simple_data(), ["stacked"], None),
    "minibatches": (lambda: sfvi.StructuredModel(population, minibatched), large(simple_data()), ["stacked"], None),
    "long format": (lambda: sfvi.StructuredModel(population, long_format), long_data(), ["stacked"], None),
    "centred": (lambda: sfvi.StructuredModel(population, centres_its_data), simple_data(), ["stacked"], "alone"),
    "size-aware": (lambda: sfvi.StructuredModel(population, knows_its_size), simple_data(), ["stacked"], "alone"),
}


@pytest.mark.parametrize(("case", "merge"), [("plain", False), *((case, True) for case in CASES)])
def test_batches_agree_with_silos_one_by_one(case, merge):
    make_model, silos, kinds, unpadded = CASES[case]
    model = make_model()
    algorithm, data, theta = bind(model, silos, optimizer=optax.adam(1e-2), num_samples=2)
    server, families, batches = run_batched(model, algorithm, data, theta, KEY, 20, merge=merge)
    expected_server, expected_families = run_one_by_one(algorithm, data, theta, KEY, 20)
    expected_families = {name: expected_families[name] for name in families}
    assert_trees_close(server.shared, expected_server.shared)
    assert_trees_close(families, expected_families)
    if merge:
        assert sorted({"stacked" if b.stacked else "merged" for b in batches}) == kinds
    if unpadded:  # silos of different size must not have been padded together
        for batch in batches:
            assert len({tuple(sizes.items()) for sizes in batch.sizes}) == 1


def test_padding_really_happens():
    model = sfvi.StructuredModel(population, with_own_latent)
    _, data, theta = bind(model, simple_data({"a": 50, "b": 47, "c": 45}))
    batches = batching.plan(model, data, theta, merge=False)
    assert len(batches) == 1
    assert batches[0].data.values["data['y']"].shape == (3, 50)


def test_many_ragged_silos_make_few_batches():
    generator = np.random.default_rng(0)
    sizes = {f"s{i:03d}": int(n) for i, n in enumerate(generator.integers(5, 200, size=120))}
    model = sfvi.StructuredModel(population, with_own_latent)
    _, data, theta = bind(model, simple_data(sizes))
    batches = batching.plan(model, data, theta, merge=False)
    assert len(batches) <= batching.MAX_BUCKETS + 1
    assert sorted(name for batch in batches for name in batch.names) == sorted(sizes)


def test_replies_arrive_in_the_order_of_names():
    """Batches of different shapes are put back in order before the server sees them."""
    model = gamma_model()
    silos = {n: gamma_data(k) for n, k in {"d": 9, "a": 3, "c": 30, "b": 3}.items()}
    algorithm, data, theta = bind(model, silos, algorithm=sfvi.SFVIAvg, num_local_steps=1)
    batches = batching.plan(model, data, theta, merge=False)
    assert [name for batch in batches for name in batch.names] == ["a", "b", "d", "c"]
    stacked = tuple(jnp.stack([data[name].silo_word for name in batch.names]) for batch in batches)
    words = np.asarray([data[name].silo_word for name in sorted(silos)])
    rounds = loop.build(algorithm, batches, {name: silo.num_units for name, silo in data.items()})
    ranks = np.concatenate([np.asarray(rank) for rank in rounds.ranks])
    np.testing.assert_array_equal(loop._sorted((stacked,), ranks)[0], words)
