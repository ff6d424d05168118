"""SFVI on the importance-weighted bound over everything."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfvi
from sfvi import bounds, participation
from sfvi.engines import loop

from ..helpers import (
    assert_trees_close,
    bind,
    everyone,
    gamma_data,
    gamma_model,
    linear_data,
    linear_model,
    linear_posterior,
    perturb,
    run_one_by_one,
    unit_numbers,
)

KEY = jax.random.key(8)
SILOS = {"a": gamma_data(4, seed=1), "b": gamma_data(3, seed=2)}


def parts(**options):
    options = {"bound": bounds.importance_weighted(3), **options}
    algorithm, data, theta = bind(gamma_model(), SILOS, **options)
    server_key, silo_key = loop.keys(KEY)
    server = algorithm.server_init(server_key, theta, unit_numbers(data))
    shared = server.shared._replace(family=perturb(server.shared.family, 1, 0.1), theta=perturb(theta, 2, 0.1))
    server = server._replace(shared=shared)
    locals_ = {name: perturb(algorithm.elbo.start_local(silo), 3, 0.1) for name, silo in data.items()}
    return algorithm, data, server, locals_, server_key, silo_key


def pooled_bound(elbo, shared, locals_, data, server_key, silo_key, number, num_draws):
    """log (1/K) sum_k exp(L_0 + sum_j L_j), in one place."""
    noise = elbo.global_noise(jax.random.fold_in(server_key, number), shared, num_draws)
    terms = jax.vmap(lambda e: elbo.server(shared, e[None]))(noise)
    for name, silo in data.items():
        draw = elbo.draw(silo_key, number, silo, noise)

        def one(e, own, draw=draw, name=name, silo=silo):
            single = draw._replace(noise=e[None], local_noise=jax.tree.map(lambda leaf: leaf[None], own))
            return elbo.silo(shared, locals_[name], single, silo)

        terms += jax.vmap(one)(draw.noise, draw.local_noise)
    return jax.nn.logsumexp(terms) - jnp.log(num_draws)


def one_round(algorithm, *rest):
    return jax.jit(functools.partial(_one_round, algorithm))(*rest)


def _one_round(algorithm, data, server, locals_, server_key, silo_key):
    broadcast = algorithm.broadcast(server_key, server)
    states, replies = {}, []
    for name, silo in data.items():
        state = algorithm.silo_start(locals_[name], broadcast, silo)
        states[name], reply, _ = algorithm.silo_step(silo_key, state, broadcast, silo)
        replies.append(reply)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies)
    server, info = algorithm.server_step(server, broadcast, stacked, everyone(len(data)))
    broadcast = algorithm.broadcast(server_key, server)
    families = {name: algorithm.silo_finish(silo_key, states[name], broadcast, data[name]) for name in data}
    return server, families, info


def test_value_and_gradient_are_those_of_pooled_data():
    """Without stopped gradients: one step of size one is the gradient of the pooled bound, for all parameters."""
    ascent = optax.sgd(1.0)
    setting = parts(estimator="reparameterization", optimizer=ascent)
    algorithm, data, before, locals_, server_key, silo_key = setting
    after, families, info = one_round(*setting)

    def bound(shared, locals_):
        return pooled_bound(algorithm.elbo, shared, locals_, data, server_key, silo_key, jnp.asarray(0), 3)

    value, (shared, local) = jax.jit(jax.value_and_grad(bound, argnums=(0, 1)))(before.shared, locals_)
    np.testing.assert_allclose(info.elbo_term, value, rtol=1e-12)
    assert_trees_close(jax.tree.map(jnp.subtract, after.shared, before.shared), shared, rtol=1e-8, atol=1e-9)
    assert_trees_close(jax.tree.map(jnp.subtract, families, locals_), local, rtol=1e-8, atol=1e-9)


def test_doubly_reparameterized_gradient_is_unbiased():
    """Against the plain gradient of the same bound: 4.5 standard errors, coordinatewise."""
    results = {}
    for estimator in ("stl", "reparameterization"):
        algorithm, data, server, locals_, server_key, silo_key = parts(estimator=estimator, optimizer=optax.sgd(1.0))

        def one(number, algorithm=algorithm, data=data, server=server, locals_=locals_, keys=(server_key, silo_key)):
            keys = [jax.random.fold_in(key, number) for key in keys]
            after, families, info = one_round(algorithm, data, server, locals_, *keys)
            moved = jax.tree.map(jnp.subtract, (after.shared, families), (server.shared, locals_))
            return info.elbo_term, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(moved)])

        results[estimator] = jax.jit(lambda n, one=one: jax.lax.map(one, n, batch_size=500))(jnp.arange(10_000))
    np.testing.assert_allclose(results["stl"][0], results["reparameterization"][0], rtol=1e-9)
    samples = [np.asarray(gradient) for _, gradient in results.values()]
    difference = samples[0].mean(0) - samples[1].mean(0)
    error = np.hypot(*(s.std(0) / np.sqrt(len(s)) for s in samples))
    assert np.all(np.abs(difference) < 4.5 * error + 1e-12)
    assert np.abs(difference).max() > 0


def test_split_changes_nothing():
    """Two silos or one, the same trajectory."""
    whole = linear_data(9)
    ids = {"a": np.arange(4), "b": np.arange(4, 9)}
    split = {"a": {k: v[:4] for k, v in whole.items()}, "b": {k: v[4:] for k, v in whole.items()}}
    options = {"bound": bounds.importance_weighted(3), "num_samples": 2}
    runs = []
    for silos, unit_ids in ((split, ids), ({"all": whole}, {"all": np.arange(9)})):
        algorithm, data, theta = bind(linear_model(), silos, unit_ids=unit_ids, **options)
        server, families = run_one_by_one(algorithm, data, theta, KEY, 20)
        runs.append((server.shared, np.concatenate([f.units["units"].loc[0] for f in families.values()])))
    assert_trees_close(runs[0], runs[1])


def test_approaches_the_evidence():
    """A mean-field family misses the evidence of a conjugate model; many draws come nearer, from below."""
    data = linear_data(6)
    exact = linear_posterior(data)
    gaps = []
    for num_draws in (1, 10):
        algorithm = sfvi.SFVI(
            bound=bounds.importance_weighted(num_draws),
            global_family=sfvi.families.mean_field(),
            local_family=sfvi.families.block(coupling="none"),
            optimizer=optax.adam(optax.cosine_decay_schedule(0.05, 2000)),
        )
        fit = sfvi.fit(linear_model(), {"a": data}, key=1, num_rounds=2000, algorithm=algorithm)
        gaps.append(exact.log_evidence - fit.elbo[-500:].mean())
    assert gaps[0] > 2 * gaps[1] > 0


@pytest.mark.parametrize("algorithm", [sfvi.SFVIAvg, sfvi.Sites])
def test_other_algorithms_refuse(algorithm):
    with pytest.raises(sfvi.OptionError, match="needs SFVI"):
        algorithm(num_local_steps=2, bound=bounds.importance_weighted(2))


def test_needs_everyone():
    with pytest.raises(sfvi.OptionError, match="all silos in every round"):
        sfvi.SFVI(bound=bounds.importance_weighted(2), participation=participation.count(1))
