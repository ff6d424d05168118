"""Silos alone, all rows together, and the rule that says what is most frequent."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import sfvi
from sfvi import baselines, zoo


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 2.0))


def silo(mu, data):
    with numpyro.plate("rows", len(data["y"])):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=data["y"])


SILOS = {"a": {"y": np.array([1.0, 2.0, 4.0])}, "b": {"y": np.array([-3.0])}}


def closed(y):
    precision = 1 / 4 + len(y)
    return y.sum() / precision, precision**-0.5


@pytest.mark.parametrize("named", [True, False])
def test_each_silo_has_the_posterior_of_its_own_rows(named):
    model = baselines.each_alone(sfvi.StructuredModel(population, {"a": silo, "b": silo} if named else silo))
    fit = sfvi.fit(model, SILOS, key=0, num_rounds=3000)
    for name, data in SILOS.items():
        draws = np.asarray(fit.silo(name).sample(0, 20_000)["mu"])
        mean, sd = closed(data["y"])
        assert abs(draws.mean() - mean) < 4 * sd / np.sqrt(len(draws)) + 1e-2
        assert abs(draws.std() / sd - 1) < 0.05


def test_pooled_rows_have_the_posterior_of_all():
    together = baselines.pooled(SILOS)
    fit = sfvi.fit(sfvi.StructuredModel(population, silo), together, key=0, num_rounds=3000)
    mean, sd = closed(np.concatenate([data["y"] for data in SILOS.values()]))
    found = [float(np.squeeze(part)) for part in fit.posterior.family.marginals()]
    np.testing.assert_allclose(found, [mean, sd], atol=2e-2)


def test_nothing_shared_is_not_shared_less():
    model = sfvi.StructuredModel(lambda: None, lambda nothing, data: silo(population(), data))
    with pytest.raises(sfvi.OptionError, match="each_alone: the population program has no latents"):
        baselines.each_alone(model)


def test_rows_that_do_not_fit_together_are_refused():
    with pytest.raises(sfvi.DataError, match="pooled: the arrays of silo 'b' are not like those of 'a'"):
        baselines.pooled({"a": {"y": np.zeros(3)}, "b": {"y": np.zeros((3, 2))}})


def test_the_majority():
    silos = {
        "a": {"x": np.zeros((4, 1)), "y": np.array([1, 1, 1, 0])},
        "b": {"x": np.zeros((2, 1)), "y": np.array([2, 2])},
    }
    found = baselines.majority(silos, num_classes=3)
    np.testing.assert_allclose(found.predict("a", np.zeros((2, 1))), [[0.25, 0.75, 0.0]] * 2)
    np.testing.assert_allclose(found.predict("b", np.zeros((1, 1))), [[0.0, 0.0, 1.0]])
    with pytest.raises(sfvi.OptionError, match="no silo 'c'"):
        found.predict("c", np.zeros((1, 1)))
    with pytest.raises(sfvi.DataError, match="y of silo 'b' must be whole numbers from 0 to 1"):
        baselines.majority(silos, num_classes=2)


def test_networks_alone_have_personal_programs():
    model = baselines.each_alone(zoo.hierarchical_bnn(num_features=2, num_classes=2, width=3))
    rng = np.random.default_rng(0)
    data = {name: {"x": rng.normal(size=(9, 2)), "y": rng.integers(0, 2, size=9)} for name in "ab"}
    fit = sfvi.fit(model, data, key=0, num_rounds=2, algorithm=sfvi.SFVI(**zoo.families_for_networks()))
    assert not jax.tree.leaves(fit.posterior.sample(0, 1))
    assert fit.silo("a").sample(0, 1)["mu"].shape == (1, 2, 3)
