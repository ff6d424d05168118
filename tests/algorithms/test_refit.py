"""The local refit: every unit gets its steps, with noise of its own, however silos are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import sfvi
from sfvi import bounds, families
from sfvi.algorithms import local_params
from sfvi.algorithms.refit import STREAM, falling_step_size, refit

from ..helpers import ASCENT, assert_trees_close, bind, linear_data, linear_model, run_batched, run_one_by_one

KEY = jax.random.key(4)
NOISE_SD, UNIT_SD = 0.3, 2.0
EXACT_SD = (1 / UNIT_SD**2 + 1 / NOISE_SD**2) ** -0.5


def means_model(batch=None):
    """Units' means far apart compared with the width of their posteriors."""

    def population():
        return numpyro.sample("mu", dist.Normal(0.0, 1.0))

    def silo(mu, data):
        with numpyro.plate("units", data["y"].shape[0], subsample_size=batch) as rows:
            b = numpyro.sample("b", dist.Normal(mu, UNIT_SD))
            numpyro.sample("y", dist.Normal(b, NOISE_SD), obs=data["y"] if rows is None else data["y"][rows])

    return sfvi.StructuredModel(population, silo)


def means_data(n, seed=0):
    rng = np.random.default_rng(seed)
    return {"y": rng.normal(0.0, UNIT_SD, n) + rng.normal(0.0, NOISE_SD, n)}


def assert_exact(silo, data):
    """Means within a tenth of an exact sd, and the sds themselves, given where q(mu) lies."""
    block, mu = silo.free.units["units"], float(silo.shared.family.center[0])
    exact = (mu / UNIT_SD**2 + data["y"] / NOISE_SD**2) * EXACT_SD**2
    assert np.sqrt(np.mean((np.asarray(block.loc[0]) - exact) ** 2)) < 0.1 * EXACT_SD
    np.testing.assert_allclose(np.exp(block.log_scale[0]), EXACT_SD, rtol=0.03)


@pytest.mark.parametrize("batch", [None, 10])
def test_a_new_silo_is_exact_with_minibatches_too(batch):
    model = means_model(batch)
    algorithm = sfvi.SFVI(bound=bounds.elbo())
    fit = sfvi.fit(model, {"a": means_data(100)}, key=0, num_rounds=500, algorithm=algorithm)
    new = means_data(95, seed=1)
    assert_exact(sfvi.fit_silo(fit.posterior, "new", new, key=0, num_steps=1500), new)


def test_the_refit_after_averaging_is_exact_with_minibatches():
    silos = {"a": means_data(100), "b": means_data(80, seed=1)}
    algorithm = sfvi.SFVIAvg(num_local_steps=100, refit_steps=1500, bound=bounds.elbo())
    fit = sfvi.fit(means_model(10), silos, key=0, num_rounds=5, algorithm=algorithm)
    for name, data in silos.items():
        assert_exact(fit.silo(name), data)


def test_padding_changes_no_number_of_steps():
    """Seven units in batches of three need three of them, six need two: beside each other as alone."""
    silos = {"a": means_data(7), "b": means_data(6, seed=1)}
    algorithm, data, theta = bind(
        means_model(3),
        silos,
        algorithm=sfvi.SFVIAvg,
        num_local_steps=2,
        refit_steps=3,
        global_family=families.mean_field(),
    )
    _, expected = run_one_by_one(algorithm, data, theta, KEY, 2)
    _, found, batches = run_batched(means_model(3), algorithm, data, theta, KEY, 2, merge=False)
    assert len(batches) == 1
    assert_trees_close(found, expected)


def test_each_unit_gets_its_steps():
    """With a step of fixed length in a fixed direction, how far a unit went counts its steps."""
    walk = optax.GradientTransformation(
        lambda params: optax.EmptyState(), lambda g, s, p=None: (jax.tree.map(jnp.ones_like, g), s)
    )
    algorithm, data, theta = bind(means_model(3), {"a": means_data(7)})
    elbo, silo = algorithm.elbo, data["a"]
    shared, free = elbo.start_shared(KEY, theta), elbo.start_local(silo)
    after = refit(elbo, KEY, shared, free, silo, num_steps=100, optimizer=walk)
    steps = np.asarray(after.units["units"].loc - free.units["units"].loc)
    assert steps.sum() == 100 * 3 * 3  # three batches of three for each of the 100 steps
    np.testing.assert_allclose(steps, 100 * 9 / 7, atol=40)


def test_the_step_size_falls_to_zero():
    sizes = [float(falling_step_size(jnp.asarray(n), 100)) for n in (0, 50, 100)]
    np.testing.assert_allclose(sizes, [0.02, 0.01, 0.0], atol=1e-12)


def test_noise_of_a_refit_is_not_that_of_the_rounds():
    """One step by exactly the gradient shows the draw that was used: the round's, and another one in the refit."""
    algorithm, data, theta = bind(
        linear_model(), {"a": linear_data(4)}, algorithm=sfvi.SFVIAvg, num_local_steps=1, optimizer=ASCENT
    )
    elbo, silo = algorithm.elbo, data["a"]
    server = algorithm.server_init(KEY, theta, silo.num_units[None])
    broadcast = algorithm.broadcast(KEY, server)
    start = algorithm.silo_init(KEY, broadcast, silo)
    shared = broadcast.shared

    @jax.jit
    def step_with(key):
        """One step of the silo with the noise of step 0 of this key."""
        own_key = jax.random.fold_in(jax.random.fold_in(key, silo.silo_word), 0)
        draw = elbo.draw(key, jnp.asarray(0), silo, elbo.global_noise(own_key, shared, 1))
        gradient = jax.grad(elbo.silo, argnums=1)(shared, start.family, draw, silo)
        return local_params.ascend(ASCENT, start.family, start.opt_state, gradient, {})[0]

    in_round = jax.jit(algorithm.silo_step)(KEY, start, broadcast, silo)[0].family
    in_refit = refit(elbo, KEY, shared, start.family, silo, num_steps=1, optimizer=ASCENT)
    assert_trees_close(in_round, step_with(KEY))
    assert_trees_close(in_refit, step_with(jax.random.fold_in(KEY, STREAM)))
    assert np.all(in_round.units["units"].loc != in_refit.units["units"].loc)
