"""The posterior predictive of a silo."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import sfvi
from sfvi import prediction


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 2.0))


def silo(mu, data):
    slope = numpyro.sample("slope", dist.Normal(mu, 1.0))
    with numpyro.plate("rows", data["x"].shape[0], subsample_size=4) as rows:
        mean = numpyro.deterministic("mean", slope * data["x"][rows])
        numpyro.deterministic("square", mean**2)
        numpyro.deterministic("large", mean > 1)
        numpyro.sample("y", dist.Normal(mean, 0.5), obs=data["y"][rows])


def rows(number, slope, seed):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=number)
    return {"x": x, "y": slope * x + 0.5 * generator.normal(size=number)}


SILOS = {"north": rows(12, 1.0, 0), "south": rows(12, 3.0, 1)}
NEW = {"x": np.array([0.0, 1.0, -2.0, 0.5, 3.0]), "y": np.zeros(5)}


@pytest.fixture(scope="module")
def fit():
    return sfvi.fit(sfvi.StructuredModel(population, silo), SILOS, key=0, num_rounds=1500)


def test_means_are_those_of_the_posterior(fit):
    """For new rows, as many as there are and none left out by minibatches; within 5 standard errors."""
    for name in SILOS:
        draws = np.asarray(fit.silo(name).sample(1, 20_000)["slope"])
        found = fit.silo(name).predict(NEW, num_samples=4000)
        error = draws.std() / np.sqrt(4000)
        np.testing.assert_allclose(found["mean"], draws.mean() * NEW["x"], atol=5 * 3 * error)
        assert abs(found["mean"][1] - draws.mean()) < 5 * error
        np.testing.assert_allclose(found["square"], (draws**2).mean() * NEW["x"] ** 2, rtol=0.1)
        share = (draws > 1).mean()
        assert abs(found["large"][1] - share) < 5 * np.sqrt(share * (1 - share) / 4000) + 1e-9
        assert np.all(found["square"][1:] > found["mean"][1:] ** 2)


def test_a_key_repeats_and_sites_can_be_chosen(fit):
    south = fit.silo("south")
    assert np.array_equal(south.predict(NEW, key=3)["mean"], south.predict(NEW, key=3)["mean"])
    assert not np.array_equal(south.predict(NEW, key=3)["mean"], south.predict(NEW, key=4)["mean"])
    assert list(south.predict(NEW, sites=["square"], num_samples=1)) == ["square"]


def test_silos_of_the_same_shape_are_compiled_once(fit):
    fit.silo("north").predict(NEW, num_samples=7)
    before = prediction.posterior_means._cached._cache_size()
    fit.silo("south").predict(NEW, num_samples=7)
    assert prediction.posterior_means._cached._cache_size() == before


def test_bad_input(fit):
    with pytest.raises(sfvi.OptionError, match=r"'probabilities' is no deterministic site.*'mean', 'square'"):
        fit.silo("north").predict(NEW, sites=["probabilities"])
    with pytest.raises(sfvi.OptionError, match=r"give a list, \['mean'\]"):
        fit.silo("north").predict(NEW, sites="mean")
    with pytest.raises(sfvi.OptionError, match="num_samples is 0"):
        fit.silo("north").predict(NEW, num_samples=0)
    with pytest.raises(sfvi.DataError, match="north"):
        fit.silo("north").predict({**NEW, "x": np.full(5, np.nan)})


def test_new_units_have_latents_that_nobody_fitted():
    def units(mu, data):
        with numpyro.plate("patients", data["y"].shape[0]):
            b = numpyro.deterministic("twice", 2 * numpyro.sample("b", dist.Normal(mu, 1.0)))
            numpyro.sample("y", dist.Normal(b, 1.0), obs=data["y"])

    fit = sfvi.fit(sfvi.StructuredModel(population, units), {"a": {"y": np.arange(3.0)}}, key=0, num_rounds=5)
    with pytest.raises(sfvi.DataError, match=r"'patients' have latents of their own.*fit_silo"):
        fit.silo("a").predict({"y": np.arange(2.0)})


def test_latents_of_another_shape_are_refused():
    def wide(mu, data):
        weights = numpyro.sample("w", dist.Normal(mu, 1.0).expand([data["x"].shape[1]]).to_event(1))
        mean = numpyro.deterministic("mean", data["x"] @ weights)
        numpyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=data["y"])

    data = {"x": np.ones((4, 2)), "y": np.ones(4)}
    fit = sfvi.fit(sfvi.StructuredModel(population, wide), {"a": data}, key=0, num_rounds=5)
    with pytest.raises(sfvi.DataError, match="other latents"):
        fit.silo("a").predict({"x": np.ones((4, 3)), "y": np.ones(4)})
