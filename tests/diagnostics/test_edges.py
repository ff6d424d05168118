"""Cases at the edge: data of other shapes than their distribution, what is no number, what is not learned yet."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import sfvi
from sfvi.diagnostics.evidence import Evidence, shifted_normal
from sfvi.diagnostics.importance import _judge, smooth
from sfvi.diagnostics.optimum import _steps
from sfvi.diagnostics.rounds import check_rounds
from sfvi.diagnostics.units import _look
from sfvi.model.observed import observations, replicate


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 1.0))


def without_plate(mu, data):
    numpyro.sample("y", dist.Normal(mu, 1.0), obs=data["y"])


def test_replicates_are_independent_where_the_distribution_is_smaller_than_the_data():
    data = sfvi.StructuredModel(population, without_plate).silo_data("a", {"y": np.zeros(200)})
    copy = replicate(jax.random.key(0), data, jnp.zeros(1), sfvi.families.Local(None, {}), {})["y"]
    assert copy.shape == (200,)
    assert abs(np.std(copy) - 1) < 0.25


def test_a_value_that_all_members_of_a_plate_share():
    def silo(mu, data):
        with numpyro.plate("units", 3):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=data["y"])

    seen = observations(sfvi.StructuredModel(population, silo).silo_data("a", {"y": np.array(0.3)}), {})["y"]
    assert seen.value.shape == (3,)
    assert seen.dims == ["units"]


def test_masks_inside_an_event():
    mask = np.array([[True, False], [True, True], [False, True]])

    def silo(mu, data):
        with numpyro.plate("units", 3):
            inner = dist.Normal(mu, 1.0).expand([3, 2]).mask(data["mask"])
            numpyro.sample("y", inner.to_event(1), obs=data["y"])

    data = {"mask": mask, "y": np.zeros((3, 2))}
    seen = observations(sfvi.StructuredModel(population, silo).silo_data("a", data), {})
    np.testing.assert_array_equal(seen["y"].counts, mask)


@pytest.fixture(scope="module")
def fit():
    model = sfvi.StructuredModel(population, without_plate)
    return sfvi.fit(model, {"a": {"y": np.arange(4.0)}}, key=0, num_rounds=20)


def test_what_a_silo_discloses_holds_no_value_of_its_data(fit):
    found = fit.diagnose(num_samples=100, disclose=["a"])["predictive, a"]
    assert list(found.table) == ["p"]
    assert "largest" in found.table.index.get_level_values("statistic")


def test_densities_that_are_no_numbers_are_not_trusted_and_zeros_weigh_nothing(fit):
    odd = np.zeros(100)
    odd[3] = np.nan
    check = fit.posterior.check_importance({"a": Evidence(odd, 0.0)})
    assert check.trust == "do not trust"
    assert "in silo 'a' is not finite" in check.verdict
    odd[3] = -np.inf
    assert fit.posterior.check_importance({"a": Evidence(odd, 0.0)}).weights[3] < 1e-100
    with pytest.raises(sfvi.OptionError, match="num_samples is 10"):
        fit.diagnose(num_samples=10)


def test_no_global_latents():
    def silo(_, data):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(level, 1.0).expand([4]).to_event(1), obs=data["y"])

    model = sfvi.StructuredModel(lambda: None, silo)
    found = sfvi.fit(model, {"a": {"y": np.arange(4.0)}}, key=0, num_rounds=20).diagnose()
    assert "no global latents" in str(found)


def test_a_bound_that_still_rises_is_doubtful_though_global_latents_rest():
    rounds = np.arange(250, 3001, 250)
    columns = pd.MultiIndex.from_product([["mean", "sd"], ["mu"]])
    path = pd.DataFrame(np.tile([0.0, 1.0], (len(rounds), 1)), rounds, columns)
    noise = np.random.default_rng(0).normal(size=3000)
    assert check_rounds(noise, path, None).trust == "fine"
    rising = check_rounds(noise + 0.1 * np.arange(3000), path, None)
    assert rising.trust == "doubtful"
    assert "still being learned" in rising.verdict


def test_newton_steps_know_of_correlations():
    """Of two coordinates that are nearly one, both 3% too wide, to first order."""
    draws = np.random.default_rng(0).normal(size=(4000, 2)) @ np.linalg.cholesky([[1, 0.98], [0.98, 1]]).T
    inverse = np.linalg.inv(np.corrcoef(draws.T))
    gradient = -(np.eye(2) + np.corrcoef(draws.T) * inverse) @ np.full(2, 0.03)
    found = _steps(np.tile(np.stack([np.zeros(2), gradient]), (4000, 1, 1)), draws, ["a", "b"])
    np.testing.assert_allclose(found["log sd"], -0.03, rtol=1e-6)
    one = _steps(np.tile(np.stack([np.zeros(2), [-0.06, 0.0]]), (4000, 1, 1)), draws, ["a", "b"])
    assert abs(one["log sd"]).max() < 0.03  # stretching one alone is steep


def test_heavy_tails_of_weights_that_hardly_differ_are_doubtful():
    shifts = pd.DataFrame({"shift of mean, in sds": [0.05], "log ratio of sds": [0.05]}, index=["mu"])
    assert _judge(0.7, 0.67, 950.0, 1000, 0.1, shifts)[0] == "doubtful"
    assert _judge(0.7, 0.67, 800.0, 1000, 0.1, shifts)[0] == "do not trust"
    assert _judge(0.7, 0.67, 950.0, 1000, 0.1, shifts + 0.3)[0] == "do not trust"


def test_a_unit_without_numbers_or_with_more_choices_than_draws():
    draws = np.random.default_rng(0).normal(size=(512, 1))
    assert _look(draws, np.full(512, np.nan), 10)[0] == np.inf
    _, shift, stretch = _look(draws, 0.1 * draws[:, 0], 1000)
    assert max(abs(shift), abs(stretch)) < 0.05


def test_more_latents_than_a_sobol_sequence_has():
    assert shifted_normal(jax.random.key(0), 2, 30_000, 1, np.float32).shape == (2, 30_000, 1)
    assert smooth(np.log(np.arange(1.0, 201.0)))[0].sum() == pytest.approx(1)
