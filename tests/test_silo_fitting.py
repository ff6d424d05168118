"""One silo's posterior given the global one: new silos, changed data, no communication."""

import jax
import numpy as np
import optax
import pytest

import sfvi

from .helpers import (
    assert_trees_close,
    gamma_data,
    gamma_model,
    linear_data,
    linear_model,
    linear_population,
    linear_silo,
)

RATE = 1 / 0.49 + 3 / 0.25


@pytest.fixture(scope="module")
def fit():
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 3000))
    algorithm = sfvi.SFVI(optimizer=optimizer, bound=sfvi.bounds.elbo())
    return sfvi.fit(linear_model(), {"a": linear_data()}, key=0, num_rounds=3000, algorithm=algorithm)


def test_a_new_silo_gets_the_exact_conditional(fit):
    new = linear_data(n=7, seed=5)
    silo = sfvi.fit_silo(fit.posterior, "new", new, key=1)
    block = silo.family.units["units"]
    mu, slope = (float(value) for value in fit.posterior.family.center)
    expected = (mu / 0.49 + (new["y"] - slope * new["x"]).sum(1) / 0.25) / RATE
    np.testing.assert_allclose(block.loc[0], expected, atol=0.01)
    np.testing.assert_allclose(np.exp(block.log_scale[0]), 1 / np.sqrt(RATE), rtol=0.02)
    np.testing.assert_allclose(block.coupling[0, 0], (1 / 0.49) / RATE, atol=0.02)
    np.testing.assert_allclose(block.coupling[1, 0], -new["x"].sum(1) / 0.25 / RATE, atol=0.02)


def test_from_a_file_alone(fit, tmp_path):
    fit.posterior.save(tmp_path / "global.npz")
    published = sfvi.GlobalPosterior.load(tmp_path / "global.npz", linear_model())
    new = linear_data(n=3, seed=5)
    one = sfvi.fit_silo(published, "new", new, key=1, num_steps=50)
    two = sfvi.fit_silo(fit.posterior, "new", new, key=1, num_steps=50)
    assert_trees_close(one.family, two.family, rtol=0, atol=0)
    one.save(tmp_path / "new.npz")
    loaded = sfvi.SiloPosterior.load(tmp_path / "new.npz", linear_model(), new)
    np.testing.assert_array_equal(loaded.sample(0, 4)["b"], one.sample(0, 4)["b"])


def test_going_on_from_an_earlier_posterior(fit):
    silo = fit.silo("a")
    same = sfvi.fit_silo(fit.posterior, "a", linear_data(), key=0, num_steps=0, start=silo)
    assert_trees_close(same.family, silo.family, rtol=0, atol=0)
    other = sfvi.fit(linear_model(), {"a": linear_data(seed=3)}, key=0, num_rounds=500)
    moved = sfvi.fit_silo(other.posterior, "a", linear_data(), key=0, num_steps=0, start=silo)
    z = other.posterior.family.center + 0.1
    noise = jax.tree.map(np.ones_like, moved._zeros())
    before = silo.family.sample(noise, z, fit.posterior.family.center)
    assert_trees_close(moved.family.sample(noise, z, other.posterior.family.center), before)


BAD = [
    ({"posterior": 3}, "posterior is 3"),
    ({"name": ""}, "name is ''"),
    ({"num_steps": -1}, "num_steps is -1"),
    ({"optimizer": 0.1}, "optimizer is 0.1"),
    ({"start": 4}, "start is 4"),
    ({"num_steps": 0}, "no network serves"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_options(fit, change, words):
    arguments = {"posterior": fit.posterior, "name": "new", "data": linear_data()} | change
    with pytest.raises(sfvi.OptionError, match=words):
        sfvi.fit_silo(**arguments, key=0)


def test_bad_data_and_unfitting_starts(fit):
    with pytest.raises(sfvi.DataError, match="NaN"):
        sfvi.fit_silo(fit.posterior, "new", {"x": np.full((2, 3), np.nan), "y": np.zeros((2, 3))}, key=0)
    with pytest.raises(sfvi.OptionError, match="other units"):
        sfvi.fit_silo(fit.posterior, "new", linear_data(n=3), key=0, start=fit.silo("a"))
    counts = sfvi.fit(gamma_model(), {"a": gamma_data()}, key=0, num_rounds=5)
    with pytest.raises(sfvi.DataError, match="cannot produce"):
        sfvi.fit_silo(counts.posterior, "new", {"x": np.ones((2, 2)), "y": np.array([-1, 2])}, key=0)


def test_a_new_silo_says_whose_program_it_uses(tmp_path):
    programs = {"a": linear_silo, "b": lambda g, data: linear_silo(g, {"x": data["x"], "y": data["y"] + 1.0})}
    model = sfvi.StructuredModel(linear_population, programs)
    fit = sfvi.fit(model, {"a": linear_data(3), "b": linear_data(3, seed=1)}, key=0, num_rounds=5)
    new = linear_data(3, seed=5)
    with pytest.raises(sfvi.ModelError, match=r"no program for silo 'new', .* those of 'a', 'b'; .* program="):
        sfvi.fit_silo(fit.posterior, "new", new, key=0)
    with pytest.raises(sfvi.OptionError, match="program is 'c' for silo 'new'; choose one of 'a', 'b'"):
        sfvi.fit_silo(fit.posterior, "new", new, key=0, program="c")
    found = {p: sfvi.fit_silo(fit.posterior, "new", new, key=0, num_steps=30, program=p) for p in programs}
    assert np.all(found["b"].family.units["units"].loc > found["a"].family.units["units"].loc)
    found["b"].save(tmp_path / "new.npz")
    again = sfvi.SiloPosterior.load(tmp_path / "new.npz", model, new)
    np.testing.assert_array_equal(again.sample(0, 3)["b"], found["b"].sample(0, 3)["b"])


def test_one_program_for_all_leaves_nothing_to_choose(fit):
    with pytest.raises(sfvi.OptionError, match="one program for all silos"):
        sfvi.fit_silo(fit.posterior, "new", linear_data(3), key=0, program="a")
