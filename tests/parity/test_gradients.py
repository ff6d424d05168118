"""Federating the ELBO moves the computation, not its value or gradient; and the known mistakes would be seen."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import sfvi
from sfvi.algorithms import elbo as elbo_module
from sfvi.algorithms import sfvi as sfvi_module
from sfvi.algorithms.noise import local_noise
from sfvi.engines import loop
from sfvi.families import Local, StructuredLocal
from sfvi.model import SiloProgram
from sfvi.model.tracing import log_jacobian_name
from sfvi.objectives import Shared

from ..helpers import (
    ASCENT,
    GLOBAL_FAMILIES,
    LOCAL_FAMILIES,
    assert_trees_close,
    bind,
    everyone,
    gamma_data,
    gamma_model,
    gamma_population,
    gamma_silo,
    perturb,
    pooled_log_density,
    unit_numbers,
)

KEY = jax.random.key(3)
SPLITS = {"one": [12], "three": [4, 4, 4]}


def split(data, sizes):
    ends = np.cumsum(sizes)[:-1]
    parts = {leaf: np.split(value, ends) for leaf, value in data.items()}
    silos = {f"s{j}": {leaf: parts[leaf][j] for leaf in data} for j in range(len(sizes))}
    return silos, {f"s{j}": ids for j, ids in enumerate(np.split(np.arange(sum(sizes)), ends))}


def pooled_stl(options, data, shared, theta, local, noise, unit_noise):
    """The pooled STL objective, with NumPyro's own log joint and transforms written out for this model.

    `shared`, `theta` and `local` are live; what stands inside log q is stopped.
    """
    stop = jax.lax.stop_gradient if options["estimator"] == "stl" else lambda tree: tree

    def one(noise, unit_noise):
        z = shared.sample(noise)
        z_units = local.sample(unit_noise, z - shared.center)
        log_q = stop(shared).log_prob(z)
        log_q += stop(local).log_prob(z_units, z - stop(shared.center)).sum()
        values = {"beta": z[:2], "sigma": jnp.exp(z[2]), "a": z_units[0], "r": jnp.exp(z_units[1])}
        params = {"scale": jnp.exp(theta["scale"]), "shift": theta["shift"]}
        log_p = pooled_log_density(gamma_population, gamma_silo, params, values, data)
        return log_p + z[2] + z_units[1].sum() - log_q  # the two log-Jacobians, once each

    return jax.vmap(one)(noise, unit_noise).mean()


def federated_gradients(silos, ids, options):
    """Value and gradients as the five functions give them, by a step of exactly the gradient."""
    algorithm, data, theta = bind(gamma_model(), silos, unit_ids=ids, optimizer=ASCENT, **options)
    server_key, silo_key = loop.keys(KEY)
    server = algorithm.server_init(server_key, theta, unit_numbers(data))
    server = server._replace(shared=Shared(perturb(server.shared.family, 1), perturb(theta, 2), None))
    broadcast, silo_init = jax.jit(algorithm.broadcast)(server_key, server), jax.jit(algorithm.silo_init)
    states = {name: silo_init(silo_key, broadcast, silo) for name, silo in data.items()}
    whole = perturb(_join([state.family for state in states.values()]), 3)
    silo_step = jax.jit(algorithm.silo_step)
    replies, value, start, blocks = [], 0.0, 0, []
    for name, silo in data.items():
        size = len(ids[name])
        block = jax.tree.map(lambda leaf, a=start, n=size: leaf[..., a : a + n], whole)
        start += size
        state = states[name]._replace(family=StructuredLocal(None, {"units": block}))
        after, reply, info = silo_step(silo_key, state, broadcast, silo)
        replies.append(reply)
        value += info.elbo_term
        blocks.append(jax.tree.map(jnp.subtract, after.family, state.family))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies)
    after, info = jax.jit(algorithm.server_step)(server, broadcast, stacked, everyone(len(data)))
    gradient = jax.tree.map(jnp.subtract, after.shared, server.shared)
    return value + info.elbo_term, (*gradient[:2], _join(blocks)), (server.shared, whole, broadcast)


def _join(parts):
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *[p.units["units"] for p in parts])


def check_parity(sizes, options):
    pooled = gamma_data(sum(sizes))
    silos, ids = split(pooled, sizes)
    value, gradients, (current, whole, broadcast) = federated_gradients(silos, ids, options)
    _, one_data, _ = bind(gamma_model(), {"all": pooled}, unit_ids={"all": np.arange(sum(sizes))})
    noise = jax.random.normal(broadcast.key, (options["num_samples"], current.family.noise_size))
    _, silo_key = loop.keys(KEY)
    drawn = local_noise(silo_key, broadcast.round, one_data["all"], {}, options["num_samples"], noise.dtype)

    def objective(shared, theta, local):
        return pooled_stl(options, pooled, shared, theta, local, noise, drawn.units["units"])

    expected = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2)))(current.family, current.theta, whole)
    assert_trees_close((value, gradients), expected)


@pytest.mark.parametrize("local", LOCAL_FAMILIES)
@pytest.mark.parametrize("shared", GLOBAL_FAMILIES)
def test_replies_and_server_term_add_up_to_the_pooled_gradient(shared, local):
    options = {
        "global_family": GLOBAL_FAMILIES[shared],
        "local_family": LOCAL_FAMILIES[local],
        "num_samples": 1,
        "estimator": "stl",
    }
    check_parity(SPLITS["three"], options)


OPTIONS = {
    "global_family": GLOBAL_FAMILIES["full"],
    "local_family": LOCAL_FAMILIES["full-mean"],
    "num_samples": 3,
    "estimator": "stl",
}


@pytest.mark.parametrize("estimator", ["stl", "reparameterization"])
@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
def test_parity_with_several_samples_and_both_estimators(sizes, estimator):
    check_parity(sizes, {**OPTIONS, "estimator": estimator})


class TestKnownMistakes:
    """Each mistake is made on purpose; the parity test above must notice."""

    def test_server_term_missing(self, monkeypatch):
        monkeypatch.setattr(
            elbo_module, "server_term", lambda population, shared, noise, *, estimator: 0.0 * jnp.sum(noise)
        )
        with pytest.raises(AssertionError):
            check_parity(SPLITS["three"], OPTIONS)

    def test_jacobian_counted_in_every_silo(self, monkeypatch):
        honest = SiloProgram.log_prob

        def wrong(self, z_global, z_local, theta, data, indices):
            shared = self.population.log_terms(z_global, theta)[log_jacobian_name("sigma")]
            return honest(self, z_global, z_local, theta, data, indices) + shared.sum()

        monkeypatch.setattr(SiloProgram, "log_prob", wrong)
        with pytest.raises(AssertionError):
            check_parity(SPLITS["three"], OPTIONS)

    def test_all_silos_share_their_local_noise(self, monkeypatch):
        def wrong(key, round, data, indices, num_samples, dtype):
            alike = {
                p: jnp.stack([jnp.zeros_like(i[0]), jnp.arange(i.shape[1], dtype=i.dtype)])
                for p, i in data.ids.units.items()
            }
            blind = sfvi.model.SiloData(
                data.values, data.sizes, Local(data.ids.silo, alike), data.num_units, data.program
            )
            return local_noise(key, round, blind, indices, num_samples, dtype)

        monkeypatch.setattr(elbo_module, "local_noise", wrong)
        with pytest.raises(AssertionError):
            check_parity(SPLITS["three"], OPTIONS)

    def test_server_and_silos_draw_different_z_global(self, monkeypatch):
        honest = sfvi_module.BoundSFVI.server_step

        def wrong(self, state, broadcast, replies, participants):
            return honest(self, state, broadcast._replace(key=jax.random.key(99)), replies, participants)

        monkeypatch.setattr(sfvi_module.BoundSFVI, "server_step", wrong)
        with pytest.raises(AssertionError):
            check_parity(SPLITS["three"], OPTIONS)

    def test_likelihood_without_the_local_prior(self, monkeypatch):
        """The printed Algorithm 1 has p(y | z_G, z_L) where p(y, z_L | z_G) belongs."""
        honest = SiloProgram.log_terms

        def wrong(self, *args):
            return {name: term for name, term in honest(self, *args).items() if name not in ("a", "r")}

        monkeypatch.setattr(SiloProgram, "log_terms", wrong)
        with pytest.raises(AssertionError):
            check_parity(SPLITS["three"], OPTIONS)


def test_silos_with_different_programs():
    """One silo counts, the other measures: the pooled gradient is that of both log joints."""
    import numpyro

    def counts(globals_, data):
        beta, sigma = globals_
        with numpyro.plate("wards", data["y"].shape[0]):
            a = numpyro.sample("a", dist.Normal(0.0, sigma))
            numpyro.sample("y", dist.Poisson(jnp.exp(beta[0] + a)), obs=data["y"])

    def measurements(globals_, data):
        beta, sigma = globals_
        numpyro.sample("t", dist.Normal(data["v"] * beta[1], sigma).to_event(1), obs=data["t"])

    generator = np.random.default_rng(0)
    silos = {
        "clinic": {"y": generator.poisson(3.0, 4)},
        "lab": {"v": generator.normal(size=6), "t": generator.normal(size=6)},
    }
    model = sfvi.StructuredModel(gamma_population, {"clinic": counts, "lab": measurements})
    algorithm, data, theta = bind(model, silos, optimizer=ASCENT)
    server_key, silo_key = loop.keys(KEY)
    server = algorithm.server_init(server_key, theta, unit_numbers(data))
    broadcast = algorithm.broadcast(server_key, server)
    states = {name: algorithm.silo_init(silo_key, broadcast, silo) for name, silo in data.items()}
    done = {n: jax.jit(algorithm.silo_step)(silo_key, states[n], broadcast, silo) for n, silo in data.items()}
    noise = jax.random.normal(broadcast.key, (1, 3))[0]
    drawn = local_noise(silo_key, broadcast.round, data["clinic"], {}, 1, noise.dtype).units["wards"][0]
    local = states["clinic"].family.units["wards"]

    def objective(shared, theta):
        z = shared.sample(noise)
        a = local.sample(drawn, z - shared.center)
        log_q = jax.lax.stop_gradient(local).log_prob(a, z - jax.lax.stop_gradient(shared.center)).sum()

        def joint():
            globals_ = gamma_population()
            counts(globals_, silos["clinic"])
            measurements(globals_, silos["lab"])

        from numpyro.infer.util import log_density

        values = {"beta": z[:2], "sigma": jnp.exp(z[2]), "a": a[0], "scale": jnp.exp(theta["scale"])}
        prior = model.population.log_prob(z, theta) - z[2]
        return log_density(joint, (), {}, values)[0] - prior - log_q

    expected = jax.jit(jax.value_and_grad(objective, argnums=(0, 1)))(server.shared.family, server.shared.theta)
    replies = [reply.gradient[:2] for _, reply, _ in done.values()]
    total = jax.tree.map(lambda *leaves: sum(leaves), *replies)
    value = sum(info.elbo_term for _, _, info in done.values())
    assert_trees_close((value, tuple(total)), expected)
