"""SFVI on a fixed sample average, climbed by quasi-Newton steps."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import sfvi
from sfvi import bounds, participation
from sfvi.algorithms.noise import matched, matched_local
from sfvi.families import Local
from sfvi.zoo import poisson_mixed_model, simulate_poisson_mixed

from ..helpers import linear_data, linear_model, linear_posterior

SILOS = {"a": linear_data(7, seed=1), "b": linear_data(5, seed=2)}
POOLED = {name: np.concatenate([SILOS[s][name] for s in SILOS]) for name in ("x", "y")}


def climb(**options):
    return sfvi.SFVI(bound=bounds.elbo(), fixed_noise=sfvi.FixedNoise(**options))


def test_matched_noise_has_the_moments_of_the_distribution():
    noise = matched(jax.random.normal(jax.random.key(0), (20, 3)))
    np.testing.assert_allclose(noise.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(noise.T @ noise / 20, np.eye(3), atol=1e-12)
    local = matched_local(Local(None, {"units": jax.random.normal(jax.random.key(1), (20, 2, 4))}), noise)
    values = local.units["units"]
    np.testing.assert_allclose(values.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose((values**2).mean(0), 1, atol=1e-12)
    np.testing.assert_allclose(jnp.tensordot(noise, values, [[0], [0]]), 0, atol=1e-11)


def test_conjugate_model_to_the_digit():
    """Averages of quadratics are exact, so a handful of draws give the closed form, and the climb gets there."""
    exact = linear_posterior(POOLED)
    fit = sfvi.fit(linear_model(), SILOS, key=0, num_rounds=30, algorithm=climb(num_samples=16, local_iterations=60))
    mean, sd = (np.asarray(part) for part in fit.posterior.family.marginals())
    np.testing.assert_allclose(mean, exact.mean[:2], atol=1e-4)
    np.testing.assert_allclose(sd, np.sqrt(np.diag(exact.covariance)[:2]), rtol=1e-3)
    assert fit.trace["gradient_size"][-1] < 1e-3 * fit.trace["gradient_size"][0]
    assert np.all(np.diff(fit.elbo) > -1e-9)  # never down


@pytest.fixture(scope="module")
def poisson_fit():
    algorithm = climb(num_samples=32, replicates=2, replicate_rounds=15)
    silos = {"a": simulate_poisson_mixed(10, seed=1), "b": simulate_poisson_mixed(10, seed=2)}
    return sfvi.fit(poisson_mixed_model(), silos, key=0, num_rounds=40, algorithm=algorithm)


def test_converges_to_a_point(poisson_fit):
    last = poisson_fit.path.iloc[-3:]
    moved = (last["mean"].iloc[-1] - last["mean"].iloc[0]).abs() / last["sd"].iloc[-1]
    assert moved.max() < 0.05


def test_the_error_from_the_noise_is_reported(poisson_fit):
    table = poisson_fit.noise_error
    assert list(table.index) == ["beta[0]", "beta[1]", "beta[2]", "tau"]
    assert table.shape == (4, 4)
    assert np.isfinite(table.to_numpy()).all()
    assert 0 < table["noise of mean, in sds"].max() < 1
    assert poisson_fit.communication["rounds"].tolist() == [40, 15, 15]
    assert len(poisson_fit.elbo) == 40


def test_exact_averages_leave_no_error():
    algorithm = climb(num_samples=16, replicates=2, replicate_rounds=20, local_iterations=60)
    fit = sfvi.fit(linear_model(), SILOS, key=0, num_rounds=30, algorithm=algorithm)
    assert fit.noise_error.abs().to_numpy().max() < 0.01


def test_with_an_ordinary_optimizer():
    """Without L-BFGS the noise is fixed all the same: a constant step comes to rest."""
    algorithm = sfvi.SFVI(
        bound=bounds.elbo(),
        fixed_noise=sfvi.FixedNoise(num_samples=16, quasi_newton=False),
        optimizer=optax.adam(optax.cosine_decay_schedule(0.05, 1500)),
    )
    fit = sfvi.fit(linear_model(), SILOS, key=0, num_rounds=1500, algorithm=algorithm)
    exact = linear_posterior(POOLED)
    np.testing.assert_allclose(fit.posterior.family.marginals()[0], exact.mean[:2], atol=5e-3)
    assert np.std(fit.elbo[-50:]) < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fixed_noise": 3}, "fixed_noise is 3"),
        ({"fixed_noise": sfvi.FixedNoise(), "num_samples": 4}, "num_samples has no use"),
        ({"fixed_noise": sfvi.FixedNoise(), "optimizer": optax.adam(0.1)}, "optimizer has no use"),
        ({"fixed_noise": sfvi.FixedNoise(), "participation": participation.count(1)}, "all silos in every round"),
        ({"fixed_noise": sfvi.FixedNoise(), "bound": bounds.importance_weighted(2)}, "locally_enhanced"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(sfvi.OptionError, match=message):
        sfvi.SFVI(**options)


def test_bad_settings():
    with pytest.raises(sfvi.OptionError, match="FixedNoise: num_samples is 1"):
        sfvi.FixedNoise(num_samples=1)


def test_too_few_draws_are_refused():
    with pytest.raises(sfvi.OptionError, match=r"num_samples is 8, too few for 2 global latents.*at least 12"):
        sfvi.fit(linear_model(), SILOS, key=0, num_rounds=2, algorithm=climb(num_samples=8, replicates=1))


def test_what_draws_cannot_carry_is_refused():
    def silo(globals_, data):
        with numpyro.plate("units", data["y"].shape[0], subsample_size=2) as rows:
            b = numpyro.sample("b", dist.Normal(globals_[0], 0.7))
            numpyro.sample("y", dist.Normal(b[:, None], 0.5).to_event(1), obs=data["y"][rows])

    model = sfvi.StructuredModel(linear_model().population.program, silo)
    with pytest.raises(sfvi.OptionError, match="silo 'a' subsamples plate 'units'"):
        sfvi.fit(model, SILOS, key=0, num_rounds=2, algorithm=climb())
    bent = sfvi.SFVI(global_family=sfvi.families.flow(), fixed_noise=sfvi.FixedNoise())
    with pytest.raises(sfvi.OptionError, match="a flow would bend around the draws"):
        sfvi.fit(linear_model(), SILOS, key=0, num_rounds=2, algorithm=bent)
