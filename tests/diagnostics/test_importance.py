"""The silos' evidence against closed forms; k-hat on good posteriors and on those spoiled on purpose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import sfvi
from sfvi import families
from sfvi.diagnostics.importance import smooth

from ..helpers import linear_data, linear_model, linear_posterior

SILOS = {"north": linear_data(seed=0), "south": linear_data(n=7, seed=1)}


@pytest.fixture(scope="module")
def fit():
    return sfvi.fit(linear_model(), SILOS, key=0, num_rounds=2500)


def log_marginal(data, mu, slope):
    """Exact log p(y_j | mu, slope): each unit's rows are jointly normal."""
    rows = data["x"].shape[1]
    covariance = 0.49 * np.ones((rows, rows)) + 0.25 * np.eye(rows)
    residuals = data["y"] - mu - slope * data["x"]
    return stats.multivariate_normal(np.zeros(rows), covariance).logpdf(residuals).sum()


def test_evidence_is_the_marginal_likelihood(fit):
    found = fit.silo("north").evidence(num_samples=40, num_draws=256, key=3)
    draws = fit.posterior.sample(3, 40)
    exact = [log_marginal(SILOS["north"], float(m), float(s)) for m, s in zip(draws["mu"], draws["slope"], strict=True)]
    assert found.noise < 0.02
    np.testing.assert_allclose(found.log_marginals, exact, atol=6 * found.noise + 1e-6)


def test_evidence_of_a_silo_with_latents_of_its_own_and_minibatches():
    """A silo's level and its units' effects, both integrated out; the units come in minibatches."""

    def population():
        return numpyro.sample("mu", dist.Normal(0.0, 1.0))

    def silo(mu, data):
        level = numpyro.sample("level", dist.Normal(mu, 0.5))
        with numpyro.plate("units", 6, subsample_size=3) as drawn:
            b = numpyro.sample("b", dist.Normal(0.0, 0.4))
            numpyro.sample("y", dist.Normal(level + b, 0.3), obs=data["y"][drawn])

    y = np.random.default_rng(0).normal(size=6)
    fit = sfvi.fit(sfvi.StructuredModel(population, silo), {"a": {"y": y}}, key=0, num_rounds=1500)
    found = fit.silo("a").evidence(num_samples=32, num_draws=256, key=1)
    covariance = 0.25 * np.ones((6, 6)) + (0.16 + 0.09) * np.eye(6)
    draws = fit.posterior.sample(1, 32)["mu"]
    exact = [stats.multivariate_normal(np.full(6, mu), covariance).logpdf(y) for mu in draws]
    np.testing.assert_allclose(found.log_marginals, exact, atol=max(5 * found.noise, 0.02))
    assert found.noise < 0.1


def test_a_good_fit_is_fine(fit):
    found = fit.diagnose()
    assert [check.name for check in found.checks] == ["convergence", "optimum", "importance"]
    assert found.trust == "fine", str(found)
    assert found["importance"].effective_draws > 900
    assert str(found).startswith("Fine.\nconvergence  Fine: ")


def test_weights_sum_to_the_evidence(fit):
    """The mean weight estimates log p(y), known in closed form."""
    evidence = {name: fit.silo(name).evidence(num_samples=1000, key=0) for name in SILOS}
    z = jax.vmap(fit.posterior.family.sample)(fit.posterior.noise(0, 1000))
    log_q = jax.vmap(fit.posterior.family.log_prob)(z)
    prior = jax.vmap(lambda z: fit.posterior.model.population.log_prob(z, {}))(z)
    log_weights = np.asarray(prior - log_q) + sum(part.log_marginals for part in evidence.values())
    pooled = {k: np.concatenate([SILOS[name][k] for name in sorted(SILOS)]) for k in ("x", "y")}
    estimate = np.log(np.mean(np.exp(log_weights - log_weights.max()))) + log_weights.max()
    assert estimate == pytest.approx(linear_posterior(pooled).log_evidence, abs=0.05)


def regression():
    def population():
        return numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    def silo(beta, data):
        with numpyro.plate("rows", data["x"].shape[0]):
            numpyro.sample("y", dist.Normal(data["x"] @ beta, 1.0), obs=data["y"])

    generator = np.random.default_rng(0)
    x = generator.normal(size=40)
    x = np.stack([x, x + 0.1 * generator.normal(size=40)], axis=1)
    data = {"x": x, "y": x.sum(1) + generator.normal(size=40)}
    return sfvi.StructuredModel(population, silo), {"a": data}


def test_mean_field_on_a_correlated_posterior_is_not_to_be_trusted():
    model, silos = regression()
    options = sfvi.SFVI(global_family=families.mean_field())
    spoiled = sfvi.fit(model, silos, key=0, num_rounds=2000, algorithm=options).diagnose()
    assert spoiled["optimum"].trust == "fine"  # the best mean-field one
    assert spoiled["importance"].trust == "do not trust", str(spoiled)
    good = sfvi.fit(model, silos, key=0, num_rounds=2000).diagnose()
    assert good.trust == "fine", str(good)


def test_a_gaussian_for_heavy_tails_is_not_to_be_trusted():
    def population():
        return numpyro.sample("z", dist.StudentT(1.5, 0.0, 1.0).expand([3]).to_event(1))

    def silo(z, data):
        numpyro.sample("y", dist.Normal(z, 20.0).to_event(1), obs=data["y"])

    model = sfvi.StructuredModel(population, silo)
    found = sfvi.fit(model, {"a": {"y": np.zeros(3)}}, key=0, num_rounds=2000).diagnose()
    assert found["importance"].trust == "do not trust", str(found)


def test_an_unconverged_fit_is_not_to_be_trusted():
    found = sfvi.fit(linear_model(), SILOS, key=0, num_rounds=100).diagnose(num_samples=500)
    assert found["optimum"].trust == "do not trust", str(found)
    assert found.trust == "do not trust"


def test_resampling_repairs_a_posterior_that_is_off(fit):
    """Moved by 0.4 sd and a fifth too wide, by hand; its weighted draws are right again."""
    family = fit.posterior.family
    mean, sd = family.marginals()
    off = dataclasses.replace(family, loc=family.loc + 0.4 * sd, log_scale=family.log_scale + jnp.log(1.2))
    moved = sfvi.GlobalPosterior(
        fit.posterior.model,
        fit.posterior.shared._replace(family=off),
        {},
        fit.posterior.local_family,
        fit.posterior.bound,
    )
    silos = {name: dataclasses_silo(fit.silo(name), moved, mean) for name in SILOS}
    check = moved.check_importance({name: s.evidence(key=0, num_samples=4000) for name, s in silos.items()}, key=0)
    assert check.trust == "doubtful"
    pooled = {k: np.concatenate([SILOS[name][k] for name in sorted(SILOS)]) for k in ("x", "y")}
    exact = linear_posterior(pooled)
    draws = check.resample(4000, key=1)
    se = np.sqrt(np.diag(exact.covariance)[:2] / check.effective_draws)
    means = [float(draws[site].mean()) for site in ("mu", "slope")]
    np.testing.assert_allclose(means, exact.mean[:2], atol=1e-9 + 4 * se.max())
    exported = moved.to_arviz(importance=check, num_samples=500)
    assert exported["posterior"].attrs["pareto_k_hat"] == check.k_hat
    assert exported["sample_stats"]["log_q"].shape == (1, 500)


def dataclasses_silo(silo, moved, center):
    """The silo's own family, measured from the new center."""
    family = silo.family.recentered(moved.family.center - center)
    return sfvi.SiloPosterior(silo.name, moved, family, silo.data)


def test_constant_weights_have_no_tail():
    weights, k_hat = smooth(np.zeros(50))
    assert k_hat == -np.inf
    np.testing.assert_allclose(weights, 1 / 50)


def test_what_cannot_be_weighed_is_refused(fit):
    with pytest.raises(sfvi.OptionError, match="power of two"):
        fit.silo("north").evidence(num_draws=10)
    few, many = (fit.silo("north").evidence(num_samples=n, num_draws=2) for n in (40, 50))
    with pytest.raises(sfvi.OptionError, match="same draws"):
        fit.posterior.check_importance({"north": few, "south": many})
    with pytest.raises(sfvi.OptionError, match="num_samples is 0"):
        fit.silo("north").evidence(num_samples=0)
    with pytest.raises(sfvi.OptionError, match="disclose"):
        fit.diagnose(disclose=["west"])
