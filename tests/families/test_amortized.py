"""Amortized inference: the network is a shared variational parameter, federated like the rest."""

import equinox as eqx
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import sfvi
from sfvi import families
from sfvi.algorithms.noise import local_noise
from sfvi.engines import loop

from ..helpers import ASCENT, assert_trees_close, bind, everyone, linear_data, linear_model, unit_numbers

KEY = jax.random.key(2)
RATE = 1 / 0.49 + 3 / 0.25  # precision of b given z_G in the linear model


def features(data):
    """All that a unit's posterior depends on in the linear model: the sums of y and x."""
    return jnp.stack([data["y"].sum(1), data["x"].sum(1)], 1)


class Linear(eqx.Module):
    """b | z_G, y is Gaussian with a mean that is linear in (features, z_G) only through products: see `exact`."""

    weight: jax.Array
    log_scale: jax.Array

    def __call__(self, unit, z_global):
        mu, slope = z_global
        mean = self.weight @ jnp.stack([unit[0], slope * unit[1], mu])
        return jnp.stack([mean, self.log_scale])


def network():
    return Linear(jnp.array([0.1, 0.0, 0.2]), jnp.array(-0.5))


def amortized(**options):
    return families.amortized(network(), features, follow_globals=True, **options)


EXACT = np.array([1 / 0.25, -1 / 0.25, 1 / 0.49]) / RATE


def split(data, sizes):
    ends = np.cumsum(sizes)[:-1]
    parts = {leaf: np.split(value, ends) for leaf, value in data.items()}
    silos = {f"s{j}": {leaf: parts[leaf][j] for leaf in data} for j in range(len(sizes))}
    return silos, {f"s{j}": ids for j, ids in enumerate(np.split(np.arange(sum(sizes)), ends))}


@pytest.mark.parametrize("estimator", ["stl", "reparameterization"])
def test_replies_add_up_to_the_pooled_gradient_of_the_network(estimator):
    data = linear_data(n=9)
    silos, ids = split(data, [4, 2, 3])
    algorithm, bound_data, theta = bind(
        linear_model(), silos, unit_ids=ids, optimizer=ASCENT, local_family=amortized(), estimator=estimator
    )
    server_key, silo_key = loop.keys(KEY)
    server = algorithm.server_init(server_key, theta, unit_numbers(bound_data))
    broadcast = algorithm.broadcast(server_key, server)
    start, step = jax.jit(algorithm.silo_init), jax.jit(algorithm.silo_step)
    done = [step(silo_key, start(silo_key, broadcast, silo), broadcast, silo) for silo in bound_data.values()]
    replies = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[reply for _, reply, _ in done])
    after, info = jax.jit(algorithm.server_step)(server, broadcast, replies, everyone(3))
    gradient = jax.tree.map(jnp.subtract, after.shared, server.shared)
    value = info.elbo_term + sum(info.elbo_term for _, _, info in done)

    _, one, _ = bind(linear_model(), {"all": data}, unit_ids={"all": np.arange(9)})
    noise = jax.random.normal(broadcast.key, (1, 2))[0]
    drawn = local_noise(silo_key, broadcast.round, one["all"], {}, 1, noise.dtype).units["units"][0, 0]
    stop = jax.lax.stop_gradient if estimator == "stl" else lambda tree: tree

    def log_q(z, weights, b):
        out = jax.vmap(weights, (0, None))(features(data), z)
        return dist.Normal(out[:, 0], jnp.exp(out[:, 1])).log_prob(b).sum()

    def pooled(family, weights):
        z = family.sample(noise)
        out = jax.vmap(weights, (0, None))(features(data), z)
        b = out[:, 0] + jnp.exp(out[:, 1]) * drawn
        log_p = dist.Normal(0.0, 2.0).log_prob(z[0]) + dist.Normal(0.0, 1.0).log_prob(z[1])
        log_p += dist.Normal(z[0], 0.7).log_prob(b).sum()
        log_p += dist.Normal(b[:, None] + z[1] * data["x"], 0.5).log_prob(data["y"]).sum()
        return log_p - stop(family).log_prob(z) - log_q(z, stop(weights), b)

    expected = jax.jit(jax.value_and_grad(pooled, argnums=(0, 1)))(server.shared.family, network())
    assert_trees_close((value, (gradient.family, gradient.network)), expected)


ALGORITHMS = {
    "SFVI": (sfvi.SFVI(local_family=amortized(), optimizer=optax.adam(optax.cosine_decay_schedule(0.05, 3000))), 3000),
    "SFVIAvg": (
        sfvi.SFVIAvg(
            num_local_steps=100, local_family=amortized(), optimizer=optax.adam(optax.cosine_decay_schedule(0.05, 3000))
        ),
        30,
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_optimum_as_free_parameters(name):
    """The network can express the exact conditional, which free parameters reach as well."""
    algorithm, num_rounds = ALGORITHMS[name]
    silos, _ = split(linear_data(n=12), [6, 6])
    fit = sfvi.fit(linear_model(), silos, key=0, num_rounds=num_rounds, algorithm=algorithm)
    learned = fit.posterior.shared.network
    np.testing.assert_allclose(learned.weight, EXACT, atol=0.02)
    np.testing.assert_allclose(np.exp(learned.log_scale), 1 / np.sqrt(RATE), rtol=0.02)
    if name == "SFVI":
        free = sfvi.fit(
            linear_model(),
            silos,
            key=0,
            num_rounds=4000,
            algorithm=sfvi.SFVI(optimizer=optax.adam(optax.cosine_decay_schedule(0.05, 4000))),
        )
        for one, other in zip(fit.posterior.family.marginals(), free.posterior.family.marginals(), strict=True):
            np.testing.assert_allclose(one, other, atol=0.01)
        np.testing.assert_allclose(fit.elbo[-500:].mean(), free.elbo[-500:].mean(), atol=0.01)
        draws, others = (f.silo("s0").sample(0, 20_000)["b"] for f in (fit, free))
        np.testing.assert_allclose(draws.mean(0), others.mean(0), atol=0.02)
        np.testing.assert_allclose(draws.std(0), others.std(0), rtol=0.03)


def test_units_never_seen_have_a_posterior_at_once(tmp_path):
    algorithm, num_rounds = ALGORITHMS["SFVI"]
    silos, _ = split(linear_data(n=12), [6, 6])
    fit = sfvi.fit(linear_model(), silos, key=0, num_rounds=num_rounds, algorithm=algorithm)
    new = linear_data(n=5, seed=8)
    posterior = sfvi.fit_silo(fit.posterior, "new", new, key=0, num_steps=0)
    draws = posterior.sample(0, 20_000)
    z = np.stack([draws["mu"], draws["slope"]], 1)
    mean = z[:, :1] / 0.49 + (new["y"].sum(1) - z[:, 1:] * new["x"].sum(1)) / 0.25
    np.testing.assert_allclose(draws["b"].mean(0), (mean / RATE).mean(0), atol=0.03)
    np.testing.assert_allclose((draws["b"] - mean / RATE).std(0), 1 / np.sqrt(RATE), rtol=0.05)

    fit.save(tmp_path)
    with pytest.raises(sfvi.ArchiveError, match="amortized local family"):
        sfvi.load(tmp_path, linear_model(), silos)
    loaded = sfvi.load(tmp_path, linear_model(), silos, local_family=amortized())
    np.testing.assert_array_equal(loaded.silo("s1").sample(0, 5)["b"], fit.silo("s1").sample(0, 5)["b"])
    again = sfvi.fit_silo(loaded.posterior, "new", new, key=0, num_steps=0)
    np.testing.assert_array_equal(again.sample(0, 5)["b"], posterior.sample(0, 5)["b"])


def small_network(key):
    return eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=key)


class LinenNetwork(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, unit):
        return flax.linen.Dense(2)(jnp.tanh(flax.linen.Dense(8)(unit)))


class NnxNetwork(flax.nnx.Module):
    def __init__(self, rngs):
        self.first = flax.nnx.Linear(2, 8, rngs=rngs)
        self.second = flax.nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, unit):
        return self.second(jnp.tanh(self.first(unit)))


def linen_network():
    net = LinenNetwork()
    return net.bind(net.init(jax.random.key(0), jnp.zeros(2)))


NETWORKS = {
    "equinox": lambda: small_network(jax.random.key(0)),
    "linen": linen_network,
    "nnx": lambda: NnxNetwork(flax.nnx.Rngs(0)),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_modules_of_every_library(kind):
    net = NETWORKS[kind]()
    chosen = families.amortized(net, features)
    unit = jnp.array([0.3, -0.2])
    block = chosen.build(chosen.initial(), unit[None], 1)
    np.testing.assert_allclose(block.given(jnp.zeros(2)).loc[0, 0], net(unit)[0], rtol=1e-5)
    silos, _ = split(linear_data(n=6), [2, 4])
    algorithm = sfvi.SFVI(local_family=chosen, optimizer=optax.adam(0.02))
    fit = sfvi.fit(linear_model(), silos, key=0, num_rounds=400, algorithm=algorithm)
    assert fit.elbo[-50:].mean() > fit.elbo[:50].mean() + 5
    moved = jax.tree.map(lambda a, b: jnp.any(a != b), fit.posterior.shared.network, chosen.initial())
    assert all(jax.tree.leaves(moved))


def pair_model(subsample=None):
    """Two latents per unit, another plate with free latents, and latents of the silo itself."""

    def population():
        return numpyro.sample("mu", dist.Normal(0.0, 1.0))

    def silo(mu, data):
        level = numpyro.sample("level", dist.Normal(mu, 1.0))
        with numpyro.plate("wards", 2):
            ward = numpyro.sample("ward", dist.Normal(level, 0.5))
        with numpyro.plate("units", data["y"].shape[0], subsample_size=subsample) as rows:
            rows = jnp.arange(data["y"].shape[0]) if rows is None else rows
            pair = numpyro.sample("pair", dist.Normal(level, 1.0).expand([2]).to_event(1))
            numpyro.sample("y", dist.Normal(pair + ward, 0.5).to_event(1), obs=data["y"][rows])

    return sfvi.StructuredModel(population, silo)


def pair_data(n, seed=0):
    return {"y": np.random.default_rng(seed).normal(1.0, 1.0, (n, 2))}


@pytest.mark.parametrize("subsample", [None, 3])
@pytest.mark.parametrize("within", ["diagonal", "full"])
def test_beside_free_latents_and_with_minibatches(subsample, within):
    net = eqx.nn.MLP(2, 4 if within == "diagonal" else 5, 8, 1, key=jax.random.key(0))
    chosen = families.amortized(net, lambda data: data["y"], plate="units", within=within)
    algorithm = sfvi.SFVI(local_family=chosen, optimizer=optax.adam(0.02))
    silos = {"a": pair_data(5), "b": pair_data(8, seed=1)}
    fit = sfvi.fit(pair_model(subsample), silos, key=0, num_rounds=600, algorithm=algorithm)
    assert fit.elbo[-100:].mean() > fit.elbo[:50].mean() + 10
    assert set(fit.silo("b").free.units) == {"wards"}
    assert fit.silo("b").sample(0, 3)["pair"].shape == (3, 8, 2)


BAD = [
    (lambda: families.amortized(3, features), "network is 3"),
    (lambda: families.amortized(LinenNetwork(), features), "has no weights"),
    (lambda: families.amortized(network(), "x"), "inputs is 'x'"),
    (lambda: families.amortized(network(), features, within="dense"), "within is 'dense'"),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_bad_options(make, words):
    with pytest.raises(sfvi.OptionError, match=words):
        make()


def test_what_does_not_fit_the_data_is_refused_before_any_round():
    silos = {"a": linear_data(n=4)}
    cases = [
        (families.amortized(small_network(KEY), lambda d: d["x"][:2]), sfvi.DataError, "4 units"),
        (families.amortized(small_network(KEY), lambda d: d["x"]), sfvi.OptionError, "cannot take"),
        (
            families.amortized(eqx.nn.MLP(2, 3, 4, 1, key=KEY), features),
            sfvi.OptionError,
            "must return 2 numbers",
        ),
    ]
    for chosen, error, words in cases:
        with pytest.raises(error, match=words):
            sfvi.fit(linear_model(), silos, key=0, num_rounds=1, algorithm=sfvi.SFVI(local_family=chosen))
    with pytest.raises(sfvi.OptionError, match="plate="):
        sfvi.fit(
            pair_model(),
            {"a": pair_data(3)},
            key=0,
            num_rounds=1,
            algorithm=sfvi.SFVI(local_family=families.amortized(small_network(KEY), lambda d: d["y"])),
        )


def test_inputs_that_mix_units_are_refused():
    """A silo's mean is another one where silos are computed together."""
    silos = {"a": linear_data(n=9), "b": linear_data(n=10, seed=1)}
    chosen = families.amortized(small_network(KEY), lambda d: features(d) - features(d).mean(0))
    for kind in (sfvi.SFVI, lambda **options: sfvi.SFVIAvg(num_local_steps=1, **options)):
        with pytest.raises(sfvi.OptionError, match="every unit by itself"):
            sfvi.fit(linear_model(), silos, key=0, num_rounds=1, algorithm=kind(local_family=chosen))


def test_a_plate_that_no_silo_has_and_failing_inputs():
    for chosen, words in [
        (families.amortized(small_network(KEY), features, plate="kids"), "no silo has the plate 'kids'"),
        (families.amortized(small_network(KEY), lambda d: d["age"]), "inputs fails on the data"),
    ]:
        with pytest.raises(sfvi.OptionError, match=words):
            sfvi.fit(
                linear_model(),
                {"a": linear_data(n=3)},
                key=0,
                num_rounds=1,
                algorithm=sfvi.SFVI(local_family=chosen),
            )
