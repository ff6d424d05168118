"""The locally enhanced bound: its value, its two gradients, and what it buys."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import sfvi
from sfvi import bounds, families
from sfvi.algorithms import local_params

from .helpers import assert_trees_close, bind, gamma_data, gamma_model, linear_data, linear_model, perturb, unit_numbers

KEY = jax.random.key(4)


def setting(model, data, **options):
    algorithm, silos, theta = bind(model, {"a": data}, **options)
    server = algorithm.server_init(KEY, theta, unit_numbers(silos))
    shared = server.shared._replace(family=perturb(server.shared.family, 1, 0.1), theta=perturb(theta, 2, 0.1))
    free = perturb(algorithm.elbo.start_local(silos["a"]), 3, 0.1)
    return algorithm.elbo, silos["a"], shared, free


def draw(elbo, silo, shared, step):
    step = jnp.asarray(step)
    noise = elbo.global_noise(jax.random.fold_in(KEY, step), shared, 1)
    return elbo.draw(KEY, step, silo, noise)


def value_and_gradients(elbo, silo, shared, free, step):
    drawn = draw(elbo, silo, shared, step)
    rows = local_params.select(free, drawn.indices)
    return jax.jit(jax.value_and_grad(elbo.silo, argnums=(0, 1)))(shared, rows, drawn, silo)


def test_value_is_the_log_mean_of_the_weights():
    """By hand for the linear model: log (1/K) sum_k p(y_i, b_ik | z) / q(b_ik | z), unit by unit."""
    data = linear_data(n=4)
    elbo, silo, shared, free = setting(
        linear_model(), data, bound=bounds.locally_enhanced(5), local_family=families.block(coupling="mean_and_scale")
    )
    drawn = draw(elbo, silo, shared, 0)
    value = elbo.silo(shared, free, drawn, silo)
    z = shared.family.sample(drawn.noise[0])
    deviation, block = z - shared.family.center, free.units["units"]
    mean = block.loc[0] + deviation @ block.coupling[:, 0]
    scale = jnp.exp(block.log_scale[0] + deviation @ block.scale_coupling[:, 0])
    b = mean + scale * drawn.local_noise.units["units"][0, :, 0]
    log_p = dist.Normal(z[0], 0.7).log_prob(b)
    log_p += dist.Normal(b[..., None] + z[1] * data["x"], 0.5).log_prob(data["y"]).sum(-1)
    log_w = log_p - dist.Normal(mean, scale).log_prob(b)
    expected = (jax.nn.logsumexp(log_w, axis=0) - np.log(5)).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-10)


MODELS = {"linear": (linear_model, linear_data), "gamma": (gamma_model, gamma_data)}


@pytest.mark.parametrize("name", MODELS)
def test_doubly_reparameterized_gradient_is_unbiased(name):
    """Against the plain pathwise gradient of the same bound, unbiased too: 4.5 standard errors, coordinatewise."""
    model, data = MODELS[name][0](), MODELS[name][1](n=3)
    results = {}
    for estimator in ("stl", "reparameterization"):
        elbo, silo, shared, free = setting(
            model,
            data,
            bound=bounds.locally_enhanced(3),
            estimator=estimator,
            local_family=families.block(coupling="mean_and_scale"),
        )

        @eqx.filter_jit
        def many(shared, free, silo, elbo=elbo):
            steps = jnp.arange(20_000)
            return jax.lax.map(lambda step: value_and_gradients(elbo, silo, shared, free, step), steps, batch_size=500)

        values, gradients = many(shared, free, silo)
        results[estimator] = values, np.concatenate([g.reshape(len(g), -1) for g in jax.tree.leaves(gradients)], 1)
    np.testing.assert_allclose(results["stl"][0], results["reparameterization"][0], rtol=1e-9)
    difference = results["stl"][1].mean(0) - results["reparameterization"][1].mean(0)
    error = np.hypot(*(g.std(0) / np.sqrt(len(g)) for _, g in results.values()))
    assert np.all(np.abs(difference) < 4.5 * error + 1e-12)
    assert np.abs(difference).max() > 0  # they are different estimators


def test_doubly_reparameterized_gradient_has_low_variance():
    """At the exact conditional posterior all weights agree and the local gradient vanishes; the plain one does not."""
    data = linear_data(n=3)
    spread = {}
    for estimator in ("stl", "reparameterization"):
        bound = bounds.locally_enhanced(4)
        elbo, silo, shared, _ = setting(linear_model(), data, bound=bound, estimator=estimator)
        rate, center = 1 / 0.49 + 3 / 0.25, shared.family.center
        loc = (center[0] / 0.49 + (data["y"] - center[1] * data["x"]).sum(1) / 0.25) / rate
        coupling = jnp.stack([jnp.full(3, 1 / 0.49 / rate), -data["x"].sum(1) / 0.25 / rate])[:, None]
        block = families.BlockGaussian(loc[None], jnp.full((1, 3), -0.5 * np.log(rate)), None, coupling, None)
        exact = families.StructuredLocal(None, {"units": block})
        gradients = [value_and_gradients(elbo, silo, shared, exact, step)[1][1] for step in range(30)]
        spread[estimator] = np.std([jax.tree.leaves(g)[0] for g in gradients])
    assert spread["stl"] < 1e-10
    assert spread["reparameterization"] > 0.1


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_change_nothing(chunk):
    whole = setting(gamma_model(), gamma_data(4), bound=bounds.locally_enhanced(5))
    parts = setting(gamma_model(), gamma_data(4), bound=bounds.locally_enhanced(5, chunk=chunk))
    assert_trees_close(value_and_gradients(*parts, 0), value_and_gradients(*whole, 0))


def test_fifty_draws_of_twenty_thousand_units_fit():
    """Besides the noise, memory is that of the draws evaluated at a time: a few arrays of chunk x units."""
    data = linear_data(n=20_000)
    taken = {}
    for chunk in (None, 5):
        parts = setting(linear_model(), data, bound=bounds.locally_enhanced(50, chunk=chunk))

        @eqx.filter_jit
        def gradient(shared, free, silo, elbo=parts[0]):
            return value_and_gradients(elbo, silo, shared, free, 0)

        taken[chunk] = (
            gradient.lower(parts[2], parts[3], parts[1]).compile().compiled.memory_analysis().temp_size_in_bytes
        )
    whole = 50 * 20_000 * 8  # one float64 for each draw of each unit
    assert taken[5] < 8 * whole
    assert taken[5] < 0.6 * taken[None]


def test_one_draw_is_the_elbo():
    one = setting(gamma_model(), gamma_data(4), bound=bounds.locally_enhanced(1))
    plain = setting(gamma_model(), gamma_data(4))
    assert_trees_close(value_and_gradients(*one, 0), value_and_gradients(*plain, 0), rtol=0, atol=0)


def test_the_bound_grows_with_the_draws_and_stays_below_the_evidence():
    """Global latents at a point: the evidence of each unit is known, and the bound approaches it from below."""
    data = linear_data(n=4)
    elbo, silo, shared, free = setting(linear_model(), data, init_scale=1.0)
    narrow = eqx.tree_at(lambda s: s.family.log_scale, shared, jnp.full(2, -30.0))
    z = narrow.family.center
    covariance = 0.25 * np.eye(3) + 0.49
    evidence = dist.MultivariateNormal(z[0] + z[1] * data["x"], covariance).log_prob(data["y"]).sum()
    means = []
    for k in (1, 4, 16, 64):
        elbo = setting(linear_model(), data, bound=bounds.locally_enhanced(k))[0]
        steps = jnp.arange(2000)
        values = jax.lax.map(lambda s, e=elbo: e.silo(narrow, free, draw(e, silo, narrow, s), silo), steps)
        means.append((float(values.mean()), float(values.std() / np.sqrt(2000))))
    gaps = [evidence - mean for mean, _ in means]
    assert gaps == sorted(gaps, reverse=True)
    assert all(gap > -4 * error for gap, (_, error) in zip(gaps, means, strict=True))
    assert gaps[-1] < 0.1 * gaps[0]


def test_silo_latents_and_minibatches():
    """Latents of the silo count as in the ELBO, and minibatches estimate the same bound."""

    def population():
        return numpyro.sample("mu", dist.Normal(0.0, 1.0))

    def program(subsample):
        def silo(mu, data):
            level = numpyro.sample("level", dist.Normal(mu, 1.0))
            numpyro.sample("spread", dist.Normal(level, 0.5), obs=data["spread"])
            with numpyro.plate("units", 6, subsample_size=subsample) as rows:
                rows = jnp.arange(6) if rows is None else rows
                r = numpyro.sample("r", dist.Gamma(2.0, jnp.exp(level)))
                numpyro.sample("y", dist.Normal(r, 0.5), obs=data["y"][rows])

        return sfvi.StructuredModel(population, silo)

    data = {"y": np.arange(6.0) / 3, "spread": np.array(0.4)}
    results = {}
    for subsample in (None, 2):
        elbo, silo, shared, free = setting(program(subsample), data, bound=bounds.locally_enhanced(3))

        @eqx.filter_jit
        def many(shared, free, silo, elbo=elbo):
            def one(step):
                drawn = draw(elbo, silo, shared, step)
                return elbo.silo(shared, local_params.select(free, drawn.indices), drawn, silo)

            return jax.lax.map(one, jnp.arange(20_000), batch_size=500)

        values = many(shared, free, silo)
        results[subsample] = values.mean(), values.std() / np.sqrt(len(values))
    error = np.hypot(results[None][1], results[2][1])
    assert abs(results[None][0] - results[2][0]) < 4 * error
