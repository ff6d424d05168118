"""Sites: its fixed points, its start, its safeguards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions import constraints

import sfvi
from sfvi import bounds, families, participation
from sfvi.algorithms import Sites, prior_site
from sfvi.algorithms.participation import Participants
from sfvi.algorithms.sites import Reply
from sfvi.algorithms.tilted import Factor
from sfvi.engines import batching, loop
from sfvi.natural import Natural, gaussian, natural, packed, unpacked

from ..helpers import (
    assert_trees_close,
    bind,
    everyone,
    gamma_model,
    linear_data,
    linear_model,
    linear_population,
    linear_posterior,
    run_batched,
    run_one_by_one,
    unit_numbers,
)

KEY = jax.random.key(5)
SILOS = {"a": linear_data(7, seed=1), "b": linear_data(12, seed=2), "c": linear_data(4, seed=3)}
POOLED = {name: np.concatenate([SILOS[s][name] for s in SILOS]) for name in ("x", "y")}
MARGINALS = slice(0, 2)


def fit(model, silos, num_rounds, **options):
    return sfvi.fit(model, silos, key=3, num_rounds=num_rounds, algorithm=Sites(**options))


def errors(posterior, mean, sd):
    found = [np.asarray(part) for part in posterior.family.marginals()]
    return (found[0] - mean) / sd, found[1] / sd - 1


@pytest.mark.parametrize("kind", ["full", "mean_field"])
def test_conjugate_model_exactly(kind):
    """Every silo's term is Gaussian, so noise vanishes at the solution and what is left is the closed form."""
    exact = linear_posterior(POOLED)
    mean, sd = exact.mean[MARGINALS], np.sqrt(np.diag(exact.covariance)[MARGINALS])
    if kind == "mean_field":
        sd = 1 / np.sqrt(np.diag(np.linalg.inv(exact.covariance[MARGINALS, MARGINALS])))
    found = fit(
        linear_model(), SILOS, 12, bound=bounds.elbo(), global_family=getattr(families, kind)(), num_local_steps=300
    )
    means, sds = errors(found.posterior, mean, sd)
    assert np.abs(means).max() < 0.01
    assert np.abs(sds).max() < 0.01
    b = found.silo("a").summary(num_samples=4000).loc["b[0]"]
    row = 2 + 0
    assert abs(b["mean"] - exact.mean[row]) < 4 * np.sqrt(exact.covariance[row, row] / 4000) + 0.01


def population():
    scale = numpyro.param("scale", 1.0, constraint=constraints.positive)
    beta = numpyro.sample("beta", dist.Normal(0.0, scale).expand([6]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    return beta, sigma


def silo(globals_, data):
    beta, sigma = globals_
    shift = numpyro.param("shift", 0.0)
    with numpyro.plate("units", data["x"].shape[0]):
        b = numpyro.sample("b", dist.Normal(shift, sigma))
        rate = jnp.exp(data["x"] @ beta + b[:, None])
        numpyro.sample("y", dist.Poisson(rate).to_event(1), obs=data["y"])


def poisson_silos(sizes=(40, 25, 35)):
    generator = np.random.default_rng(0)
    beta, silos = generator.normal(size=6) * 0.5, {}
    for number, size in enumerate(sizes):
        x = generator.normal(size=(size, 4, 6))
        b = 0.7 + 0.6 * generator.normal(size=size)
        silos[f"s{number}"] = {"x": x, "y": generator.poisson(np.exp(x @ beta + b[:, None]))}
    return silos


@pytest.fixture(scope="module")
def poisson_optimum():
    """SFVI's own optimum of a model with theta in both programs and a prior that is not Gaussian."""
    model = sfvi.StructuredModel(population, silo)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 8000))
    algorithm = sfvi.SFVI(bound=bounds.elbo(), optimizer=optimizer)
    return model, sfvi.fit(model, poisson_silos(), key=1, num_rounds=8000, algorithm=algorithm)


def test_reaches_the_optimum_of_sfvi(poisson_optimum):
    """Point estimates in both programs, the server's own site, and absent silos: 0.1 sd and 3%."""
    model, best = poisson_optimum
    who = participation.count(2)
    found = fit(model, poisson_silos(), 25, bound=bounds.elbo(), num_local_steps=500, participation=who)
    mean, sd = (np.asarray(part) for part in best.posterior.family.marginals())
    means, sds = errors(found.posterior, mean, sd)
    assert np.abs(means).max() < 0.1
    assert np.abs(sds).max() < 0.03
    for name in ("scale", "shift"):
        np.testing.assert_allclose(found.theta[name], best.theta[name], rtol=0.03)


def test_stays_at_the_optimum_of_sfvi(poisson_optimum):
    """Started there, with sites that are shares of it, the mean is back after the silos found theirs."""
    model, best = poisson_optimum
    algorithm = Sites(bound=bounds.elbo(), num_local_steps=300)
    found = sfvi.fit(model, poisson_silos(), key=4, num_rounds=4, algorithm=algorithm, start=best)
    mean, sd = (np.asarray(part) for part in best.posterior.family.marginals())
    means, sds = errors(found.posterior, mean, sd)
    assert np.abs(means).max() < 0.1
    assert np.abs(sds).max() < 0.05


def exact_sites(data):
    """The closed-form factor of each silo of the linear model: b integrated out, y is Gaussian in (mu, slope)."""
    sites = {}
    for name, part in data.items():
        precision, shift = np.zeros((2, 2)), np.zeros(2)
        covariance = 0.49 + 0.25 * np.eye(3)
        for x, y in zip(part["x"], part["y"], strict=True):
            design = np.stack([np.ones(3), x], 1)
            weighted = np.linalg.solve(covariance, design)
            precision, shift = precision + design.T @ weighted, shift + weighted.T @ y
        sites[name] = Natural(jnp.asarray(precision), jnp.asarray(shift))
    return sites


def exact_locals(data, center):
    rate = 1 / 0.49 + 3 / 0.25
    loc = (center[0] / 0.49 + (data["y"] - center[1] * data["x"]).sum(1) / 0.25) / rate
    coupling = jnp.stack([jnp.full(len(loc), 1 / 0.49 / rate), -data["x"].sum(1) / 0.25 / rate])[:, None]
    scale = jnp.full((1, len(loc)), -0.5 * np.log(rate))
    return families.StructuredLocal(None, {"units": families.BlockGaussian(loc[None], scale, None, coupling, None)})


def test_nothing_changes_where_the_gradient_of_sfvi_vanishes():
    """At the exact posterior, held as the product of exact factors: one round, no silo moves."""
    options = {"num_local_steps": 20, "optimizer": optax.sgd(1e-3)}  # Adam would blow rounding up
    algorithm, data, theta = bind(linear_model(), SILOS, algorithm=Sites, **options)
    server_key, silo_key = loop.keys(KEY)
    server = algorithm.server_init(server_key, theta, unit_numbers(data))
    sites = exact_sites(SILOS)
    prior = prior_site.exact(algorithm.elbo, server.shared)
    np.testing.assert_allclose(prior.latents.precision, np.diag([0.25, 1.0]), atol=1e-12)
    total = prior.latents
    for site in sites.values():
        total = total.plus(site)
    family = gaussian(total)
    shared = server.shared._replace(family=family)
    server = server._replace(shared=shared, total=server.total._replace(latents=total), first=jnp.asarray(False))
    broadcast = algorithm.broadcast(server_key, server)
    nothing, step = jnp.zeros(0), jax.jit(algorithm.silo_step)
    for name, silo_data in data.items():
        state = algorithm.silo_start(exact_locals(SILOS[name], family.center), broadcast, silo_data)
        state = state._replace(site=Factor(sites[name], Natural(nothing, nothing)))
        _, reply, _ = step(silo_key, state, broadcast, silo_data)
        size = jnp.abs(reply.change.latents.precision).max() / jnp.abs(total.precision).max()
        assert size < 1e-9
    gradient = jax.jit(jax.grad(lambda s: _pooled_elbo(algorithm.elbo, s, data)))(shared)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) < 1e-9


def _pooled_elbo(elbo, shared, data):
    value = 0.0
    for number in range(2):  # each draw by itself has no gradient there
        noise = elbo.global_noise(jax.random.fold_in(KEY, number), shared, 1)
        value += elbo.server(shared, noise)
        for name, silo_data in data.items():
            local = exact_locals(SILOS[name], jax.lax.stop_gradient(shared.family.center))
            value += elbo.silo(shared, local, elbo.draw(KEY, jnp.asarray(number), silo_data, noise), silo_data)
    return value


def test_sites_and_the_whole_stay_together():
    """The server never sees a site, yet its total is their product after any number of rounds."""
    algorithm, data, theta = bind(linear_model(), SILOS, algorithm=Sites, num_local_steps=5)
    rounds = loop.build(
        algorithm,
        batching.plan(linear_model(), data, theta, merge=False),
        {name: silo_data.num_units for name, silo_data in data.items()},
    )
    state = rounds.run(KEY, rounds.init(KEY, theta), jnp.asarray(4)).state
    server, total = state.server, state.server.own
    for batch, stacked in zip(state.silos, rounds.stacked, strict=True):
        site = jax.tree.map(lambda leaf: leaf.sum(0), batch.site) if stacked else batch.site
        total = total.plus(site)
    assert_trees_close(total, server.total, rtol=1e-8, atol=1e-8)
    assert_trees_close(natural(server.shared.family), server.total.latents, rtol=1e-8, atol=1e-8)


def test_together_as_one_by_one():
    options = {"num_local_steps": 3, "participation": participation.count(2), "refit_steps": 2}
    model = linear_model()
    algorithm, data, theta = bind(model, SILOS, algorithm=Sites, **options)
    server, locals_ = run_one_by_one(algorithm, data, theta, KEY, 3)
    together = run_batched(model, algorithm, data, theta, KEY, 3, merge=False)
    assert_trees_close(together[0].shared, server.shared, rtol=1e-7, atol=1e-7)
    assert_trees_close(together[1], locals_, rtol=1e-7, atol=1e-7)


def test_absent_silos_keep_their_site():
    algorithm, data, theta = bind(linear_model(), SILOS, algorithm=Sites, num_local_steps=2)
    server_key, silo_key = loop.keys(KEY)
    server = algorithm.server_init(server_key, theta, unit_numbers(data))
    broadcast = algorithm.broadcast(server_key, server)
    replies = []
    for silo_data in data.values():
        state = algorithm.silo_init(silo_key, broadcast, silo_data)
        replies.append(algorithm.silo_step(silo_key, state, broadcast, silo_data)[1])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies)
    some = Participants(jnp.arange(3), jnp.array([1.5, 0.0, 1.5]))
    after = algorithm.server_step(server, broadcast, stacked, some)[0]
    changes = [r.change._replace(latents=unpacked(r.change.latents, server.total.latents)) for r in replies]
    expected = server.total.plus(changes[0]).plus(changes[2])
    assert_trees_close(after.total, expected)


def test_damping_adapts():
    """Rounds that agree make it grow, rounds that undo each other make it fall; a given one stays."""
    algorithm, data, theta = bind(linear_model(), SILOS, algorithm=Sites, num_local_steps=2)
    server_key, _ = loop.keys(KEY)
    server = algorithm.server_init(server_key, theta, unit_numbers(data))
    server = server._replace(first=jnp.asarray(False))
    np.testing.assert_allclose(server.damping, 0.7 / np.sqrt(3))
    push = server.total._replace(latents=packed(server.total.latents))
    push = jax.tree.map(lambda leaf: 0.01 * jnp.ones((3, *leaf.shape)), push)
    dampings = []
    for sign in (1, 1, 1, -1, 1, -1):
        broadcast = algorithm.broadcast(server_key, server)
        reply = Reply(jax.tree.map(lambda leaf, s=sign: s * leaf, push))
        server, _ = algorithm.server_step(server, broadcast, reply, everyone(3))
        dampings.append(float(server.damping))
    assert dampings[0] < dampings[1] < dampings[2] == 1.0
    assert dampings[2] > dampings[3] > dampings[4] > dampings[5]
    fixed = dataclasses.replace(algorithm.options, damping=0.4).bind(algorithm.elbo.model)
    server = fixed.server_init(server_key, theta, unit_numbers(data))
    for _ in range(3):
        server, _ = fixed.server_step(server, fixed.broadcast(server_key, server), Reply(push), everyone(3))
        np.testing.assert_allclose(server.damping, 0.4)


def test_minibatches():
    """Half of the units in a step: the same posterior, a little noisier."""

    def minibatched(globals_, data):
        mu, slope = globals_
        with numpyro.plate("units", data["x"].shape[0], subsample_size=6) as rows:
            b = numpyro.sample("b", dist.Normal(mu, 0.7))
            mean = b[:, None] + slope * data["x"][rows]
            numpyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=data["y"][rows])

    silos = {"a": linear_data(12, seed=1), "b": linear_data(12, seed=2)}
    exact = linear_posterior({k: np.concatenate([silos[s][k] for s in silos]) for k in ("x", "y")})
    found = fit(sfvi.StructuredModel(linear_population, minibatched), silos, 12, num_local_steps=1000)
    means, sds = errors(found.posterior, exact.mean[MARGINALS], np.sqrt(np.diag(exact.covariance)[MARGINALS]))
    assert np.abs(means).max() < 0.1
    assert np.abs(sds).max() < 0.05


def test_prior_is_recognized():
    linear, gamma = linear_model(), gamma_model()
    assert linear.population.curvature == (True, True, False)
    assert gamma.population.curvature == (False, False, True)

    def correlated():
        return numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1.0, 0.5], [0.5, 1.0]])))

    def observe(z, data):
        numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=data["y"])

    assert sfvi.StructuredModel(correlated, observe).population.curvature == (True, False, False)


@pytest.mark.parametrize(
    "prior",
    [dist.Cauchy(0.0, 25.0), dist.StudentT(3.0, 0.0, 50.0), dist.HalfNormal(1000.0)],
)
def test_wide_priors_are_not_taken_for_gaussian(prior):
    """Near zero they look flat, and a silo whose data lie far away would be held there."""

    def population():
        return numpyro.sample("narrow", dist.Normal(0.0, 0.1)) + numpyro.sample("z", prior)

    def observe(z, data):
        numpyro.sample("y", dist.Normal(z, 1.0), obs=data["y"])

    assert not sfvi.StructuredModel(population, observe).population.curvature.constant


def test_priors_that_depend_on_latents_are_not_taken_for_gaussian():
    def population():
        return numpyro.sample("z", dist.Normal(0.0, jnp.exp(numpyro.sample("scale", dist.Normal(0.0, 1.0)))))

    def observe(z, data):
        numpyro.sample("y", dist.Normal(z, 1.0), obs=data["y"])

    assert not sfvi.StructuredModel(population, observe).population.curvature.constant


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, "damping is 0.0; give a number above 0"),
        ({"damping": 1.5}, "damping is 1.5"),
        ({"num_local_steps": 0}, "num_local_steps is 0"),
        ({"step_size": -1}, "step_size is -1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(sfvi.OptionError, match=message):
        Sites(**options)


def test_families_without_natural_parameters_are_refused():
    with pytest.raises(sfvi.OptionError, match=r"choose global_family=families.mean_field\(\) or full\(\)"):
        fit(linear_model(), SILOS, 2, global_family=families.low_rank(rank=1))


def regression(num_silos=12, rows=30, size=8, common=1.0):
    """Linear regression with known noise and covariates that hang together: the posterior is Gaussian."""
    generator = np.random.default_rng(5)
    x = generator.normal(size=(num_silos, rows, size)) + common * generator.normal(size=(num_silos, rows, 1))
    y = x @ np.linspace(-1, 1, size) + generator.normal(size=(num_silos, rows))
    precision = np.eye(size) + np.einsum("jnk,jnl->kl", x, x)
    mean = np.linalg.solve(precision, np.einsum("jnk,jn->k", x, y))

    def population():
        return numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([size]).to_event(1))

    def silo(beta, data):
        with numpyro.plate("rows", data["y"].shape[0]):
            numpyro.sample("y", dist.Normal(data["x"] @ beta, 1.0), obs=data["y"])

    silos = {f"s{j:02d}": {"x": x[j], "y": y[j]} for j in range(num_silos)}
    return sfvi.StructuredModel(population, silo), silos, mean, np.diag(precision) ** -0.5


def test_mean_field_silos_reach_the_closed_form():
    """Twelve silos that foresee each other, covariates that hang together: a tenth of an sd, 3%."""
    model, silos, mean, sd = regression()
    found = fit(model, silos, 15, global_family=families.mean_field(), num_local_steps=600)
    means, sds = errors(found.posterior, mean, sd)
    assert np.abs(means).max() < 0.1
    assert np.abs(sds).max() < 0.03


def test_mean_field_silos_stay_where_the_gradient_of_sfvi_vanishes():
    """Each of two silos knows one coordinate, far beyond its share, so the other's cavity is negative: none moves."""
    silos = {"a": {"x": np.array([[3.0, 0.0], [0.0, 0.5]]), "y": np.array([1.0, -2.0])}}
    silos["b"] = {"x": silos["a"]["x"][:, ::-1], "y": np.array([0.5, 0.3])}
    model, *_ = regression(size=2)
    options = {"num_local_steps": 20, "optimizer": optax.sgd(1e-3), "global_family": families.mean_field()}
    algorithm, data, theta = bind(model, silos, algorithm=Sites, **options)
    server_key, silo_key = loop.keys(KEY)
    server = algorithm.server_init(server_key, theta, unit_numbers(data))
    sites = {
        name: Natural(jnp.asarray((part["x"] ** 2).sum(0)), jnp.asarray(part["x"].T @ part["y"]))
        for name, part in silos.items()
    }
    total = prior_site.exact(algorithm.elbo, server.shared).latents
    for site in sites.values():
        total = total.plus(site)
    assert all(np.any(np.asarray(total.precision - 2 * site.precision) < 0) for site in sites.values())
    shared = server.shared._replace(family=gaussian(total))
    server = server._replace(shared=shared, total=server.total._replace(latents=total), first=jnp.asarray(False))
    broadcast = algorithm.broadcast(server_key, server)
    nothing = jnp.zeros(0)
    for name, silo_data in data.items():
        state = algorithm.silo_init(silo_key, broadcast, silo_data)
        state = state._replace(site=Factor(sites[name], Natural(nothing, nothing)))
        _, reply, _ = algorithm.silo_step(silo_key, state, broadcast, silo_data)
        assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(reply.change.latents)) < 1e-9


def spread_silo(mu, data):
    spread = numpyro.param("spread", 0.2, constraint=constraints.positive)
    with numpyro.plate("rows", data["y"].shape[0]):
        numpyro.sample("y", dist.Normal(mu, spread), obs=data["y"])


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_point_estimates_of_silos_that_differ(factor):
    """No global latents, silos of very different spread, a poor start: the maximum of the likelihood, to 1e-4."""
    generator = np.random.default_rng(0)
    silos = {"a": {"y": factor * generator.normal(size=100)}, "b": {"y": 0.5 * generator.normal(size=100)}}
    found = fit(sfvi.StructuredModel(lambda: jnp.zeros(()), spread_silo), silos, 30, num_local_steps=300)
    best = np.sqrt(np.mean(np.concatenate([silo["y"] for silo in silos.values()]) ** 2))
    assert float(found.theta["spread"]) == pytest.approx(best, rel=1e-4)


def test_mean_field_silos_that_contradict_each_other():
    """Poisson silos with other truths each, where cavities of copies are negative: SFVI's answer in 60 rounds."""
    generator = np.random.default_rng(0)
    truths = {"a": [3.0, 1.0], "b": [-1.0, -1.0], "c": [1.0, 0.0], "d": [0.0, 2.0]}
    covariates = {name: np.column_stack([np.ones(30), 0.3 * generator.normal(size=30)]) for name in truths}
    silos = {
        name: {"x": x, "y": generator.poisson(np.exp(x @ np.array(truths[name])))} for name, x in covariates.items()
    }

    def population():
        return numpyro.sample("z", dist.Normal(0.0, 10.0).expand([2]).to_event(1))

    def silo(z, data):
        with numpyro.plate("rows", data["y"].shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(data["x"] @ z)), obs=data["y"])

    model, options = sfvi.StructuredModel(population, silo), {"global_family": families.mean_field()}
    best = sfvi.fit(model, silos, key=1, num_rounds=6000, algorithm=sfvi.SFVI(**options)).posterior.family.marginals()
    means, sds = errors(fit(model, silos, 60, num_local_steps=500, **options).posterior, *map(np.asarray, best))
    assert np.abs(means).max() < 0.1
    assert np.abs(sds).max() < 0.03
