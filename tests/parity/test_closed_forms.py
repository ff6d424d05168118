"""Models whose posterior is known exactly and lies in the family: it must be found, and the ELBO be the evidence."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions import constraints

import sfvi
from sfvi import bounds

from ..helpers import linear_data, linear_model, linear_posterior

ROUNDS = 8000


def decaying(rounds=ROUNDS, start=0.03):
    return optax.adam(optax.cosine_decay_schedule(start, rounds))


@pytest.fixture(scope="module")
def linear_fit():
    data = linear_data()
    silos, ids = sfvi.data.split_units(data, {"a": 7, "b": 4, "c": 1}, seed=0)
    algorithm = sfvi.SFVI(optimizer=decaying(), bound=bounds.elbo())
    fit = sfvi.fit(linear_model(), silos, key=1, num_rounds=ROUNDS, algorithm=algorithm)
    return fit, ids, linear_posterior(data)


def test_mean_and_covariance_of_the_global_latents(linear_fit):
    fit, _, exact = linear_fit
    family = fit.posterior.family
    factor = np.asarray(jax.jacobian(family.sample)(np.zeros(2)))
    np.testing.assert_allclose(family.loc, exact.mean[:2], atol=1e-3)
    np.testing.assert_allclose(factor @ factor.T, exact.covariance[:2, :2], atol=1e-3)


def test_local_means_variances_and_their_covariance_with_the_global_ones(linear_fit):
    fit, ids, exact = linear_fit
    shared = fit.posterior.family
    factor = np.asarray(jax.jacobian(shared.sample)(np.zeros(2)))
    for name, units in ids.items():
        block = fit.silo(name).family.units["units"]
        coupling = np.asarray(block.coupling)[:, 0, :].T  # units x 2
        cross = factor @ factor.T @ coupling.T
        variance = np.exp(2 * np.asarray(block.log_scale)[0]) + np.einsum("ui,iu->u", coupling, cross)
        np.testing.assert_allclose(block.loc[0], exact.mean[2 + units], atol=1e-3)
        np.testing.assert_allclose(cross, exact.covariance[:2, 2 + units], atol=1e-3)
        np.testing.assert_allclose(variance, np.diag(exact.covariance)[2 + units], atol=1e-3)


def test_elbo_at_the_optimum_is_the_log_evidence(linear_fit):
    """Every single estimate, not only their mean: at the exact posterior the integrand is constant."""
    fit, _, exact = linear_fit
    np.testing.assert_allclose(fit.elbo[-50:], exact.log_evidence, atol=1e-3)


def test_draws_have_the_posterior_moments(linear_fit):
    fit, ids, exact = linear_fit
    draws = fit.silo("a").sample(jax.random.key(2), 20_000)
    joint = np.column_stack([draws["mu"], draws["slope"], draws["b"]])
    index = np.concatenate([[0, 1], 2 + ids["a"]])
    sd = np.sqrt(np.diag(exact.covariance))[index]
    np.testing.assert_array_less(np.abs(joint.mean(0) - exact.mean[index]) / sd, 4 / np.sqrt(20_000) + 2e-3)
    correlation = exact.covariance[np.ix_(index, index)] / np.outer(sd, sd)
    np.testing.assert_allclose(np.corrcoef(joint.T), correlation, atol=4 / np.sqrt(20_000) + 2e-3)


def test_single_precision_finds_it_too(float32):
    data = linear_data()
    silos, _ = sfvi.data.split_units(data, {"a": 7, "b": 5}, seed=0)
    fit = sfvi.fit(linear_model(), silos, key=1, num_rounds=4000, algorithm=sfvi.SFVI(optimizer=decaying(4000)))
    exact = linear_posterior(data)
    assert fit.posterior.family.loc.dtype == np.float32
    np.testing.assert_allclose(fit.posterior.family.loc, exact.mean[:2], atol=5e-3)
    np.testing.assert_allclose(fit.elbo[-50:].mean(), exact.log_evidence, atol=1e-2)


def test_empirical_bayes_finds_the_maximum_of_the_evidence():
    """b ~ N(m, tau^2), y ~ N(b, 1): the evidence is greatest at m = mean(y), tau^2 = var(y) - 1."""

    def population():
        return numpyro.param("m", 0.0)

    def silo(m, data):
        tau = numpyro.param("tau", 1.0, constraint=constraints.positive)
        with numpyro.plate("units", data["y"].shape[0]):
            b = numpyro.sample("b", dist.Normal(m, tau))
            numpyro.sample("y", dist.Normal(b, 1.0), obs=data["y"])

    y = np.random.default_rng(0).normal(0.5, 2.0, size=60)
    silos = {"a": {"y": y[:45]}, "b": {"y": y[45:]}}
    fit = sfvi.fit(
        sfvi.StructuredModel(population, silo),
        silos,
        key=0,
        num_rounds=ROUNDS,
        algorithm=sfvi.SFVI(optimizer=decaying()),
    )
    # Unlike that of eta, the gradient of theta stays noisy at the optimum: 0.01 is 1/25 of m's own standard error.
    np.testing.assert_allclose(fit.theta["m"], y.mean(), atol=1e-2)
    np.testing.assert_allclose(fit.theta["tau"], np.sqrt(y.var() - 1), atol=1e-2)
    evidence = dist.Normal(y.mean(), y.std()).log_prob(y).sum()
    np.testing.assert_allclose(fit.elbo[-50:].mean(), evidence, atol=1e-2)
