"""How much of the noise is left in a result is known before a run, and said."""

import logging
import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import sfvi
from sfvi import families, participation
from sfvi.algorithms.under_noise import SCALES, _rate, average, noise_left
from sfvi.errors import DivergenceError

from .models import plain_silo, rows_data, two_globals
from .test_budget import run

ROUNDS, KEYS = 400, 6


def normal_means():
    def population():
        return numpyro.sample("means", dist.Normal(0.0, 10.0).expand([5]).to_event(1))

    def silo(means, data):
        with numpyro.plate("people", data["y"].shape[0]):
            numpyro.sample("y", dist.Normal(means, 1.0).to_event(1), obs=data["y"])

    return sfvi.StructuredModel(population, silo)


def planned(**options):
    """What is left of the noise with three silos."""
    privacy = sfvi.UnitPrivacy(clip=0.5, noise_multiplier=4.0)
    chosen = sfvi.SFVI(**{"privacy": privacy} | options).planned(ROUNDS)
    family = (chosen.global_family or families.full())(jax.numpy.zeros(2), 0.1)
    return noise_left(chosen, family, num_silos=3, num_rounds=ROUNDS)


def test_errors_of_a_conjugate_model_are_what_was_said():
    """Its posterior is known, and hardly a unit is shortened: what is left are the noise's errors, 30 of them."""
    silos = {name: {"y": np.random.default_rng(seed).normal(0.1, 1.0, (500, 5))} for seed, name in enumerate("abc")}
    total, precision = sum(silo["y"].sum(0) for silo in silos.values()), 1500 + 0.01
    options = sfvi.SFVI(privacy=sfvi.UnitPrivacy(clip=0.5, noise_multiplier=12.0))
    model, errors = normal_means(), []
    for key in range(KEYS):
        fit = sfvi.fit(model, silos, key=key, num_rounds=ROUNDS, algorithm=options)
        errors.append((np.asarray(fit.posterior.shared.family.loc) - total / precision) * precision**0.5)
    said = fit.privacy.left
    assert said == pytest.approx(12 * 0.5 * 3**0.5 * (4 / 3) ** 0.5 / (0.6 * ROUNDS) ** 0.5)
    assert 0.6 * said < np.sqrt(np.mean(np.square(errors))) < 1.5 * said  # three standard errors of 30 errors, and more


def test_what_it_depends_on():
    """Noise, how many silos make it together, and that a part of the units is drawn."""
    alone = planned()
    assert planned(privacy=sfvi.UnitPrivacy(clip=1.0, noise_multiplier=4.0)) == pytest.approx(2 * alone)
    shared = sfvi.UnitPrivacy(clip=0.5, noise_multiplier=4.0, shared_by=3)
    assert planned(privacy=shared) == pytest.approx(alone / 3**0.5)
    few = sfvi.UnitPrivacy(clip=0.5, noise_multiplier=4.0, sampling_rate=0.25)
    assert planned(privacy=few) == pytest.approx(alone * ((16 * 12 + 3) / 12) ** 0.5)
    assert planned(global_family=families.mean_field()) == alone
    for unknown in (
        {"privacy": None},
        {"privacy": sfvi.UnitPrivacy(clip=0.5, noise_multiplier=0.0)},
        {"privacy": sfvi.SiloPrivacy(clip=0.5, noise_multiplier=4.0)},
        {"global_family": families.flow()},
        {"participation": participation.count(2)},
        {"optimizer": optax.adam(0.01)},
    ):
        assert planned(**unknown) is None


def test_the_usual_clip_is_the_rule_of_the_documentation():
    assert sfvi.UnitPrivacy.usual_clip(num_units=32_000, num_latents=5) == pytest.approx(10 * (5 / 32_000) ** 0.5)
    assert sfvi.UnitPrivacy.usual_clip(num_units=900, num_latents=4, mean_field=True) == pytest.approx(7 * 2 / 30)
    with pytest.raises(sfvi.OptionError, match="usual_clip: num_units is 0"):
        sfvi.UnitPrivacy.usual_clip(num_units=0, num_latents=5)


@pytest.mark.parametrize("noise", [30.0, 100.0])
def test_sds_arrive_where_less_than_one_is_left(noise):
    """Steps of precisions in a run add up to one over the square of what is left: to one, where that is one sd."""
    privacy, rounds = sfvi.UnitPrivacy(clip=0.5, noise_multiplier=noise), 5000
    left = average(privacy, num_silos=3, num_rounds=rounds)
    variance = 3 * (0.5 * noise) ** 2
    steps = sum(float(_rate(variance, SCALES, count, rounds)) for count in range(0, rounds, 50)) * 50
    assert steps == pytest.approx(1 / left**2, rel=0.25)


def test_a_run_that_will_tell_little_says_so_before_it_begins():
    model, silos = sfvi.StructuredModel(two_globals, plain_silo), {"a": rows_data(seed=0), "b": rows_data(seed=1)}

    def fit(noise, callback=None):
        privacy = sfvi.UnitPrivacy(clip=1.0, noise_multiplier=noise)
        return sfvi.fit(model, silos, key=0, num_rounds=20, algorithm=sfvi.SFVI(privacy=privacy), callback=callback)

    def too_early(progress):
        raise AssertionError(f"{progress} came before the warning")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            UserWarning, match=r"about 4\.7 posterior sds .* variance component may be lost.* make the noise together"
        ):
            fit(10.0, too_early)
        assert "noise alone leaves an error of about 0.47 posterior sds in the means; too few" in str(fit(1.0).privacy)


def test_a_deployed_run_says_so_at_the_server(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "sfvi"):
        fit = run(tmp_path)
    assert fit.privacy.left > 1
    assert sum("privacy: The noise " in line for line in caplog.messages) == 1


def test_a_run_that_goes_on_does_not_say_it_again(tmp_path):
    model, silos = sfvi.StructuredModel(two_globals, plain_silo), {"a": rows_data(seed=0)}
    options = sfvi.SFVI(privacy=sfvi.UnitPrivacy(clip=1.0, noise_multiplier=10.0))
    said = {"key": 0, "num_rounds": 20, "algorithm": options, "checkpoint": tmp_path / "run.npz"}
    with pytest.warns(UserWarning, match=r"privacy: The noise .* or have more of them: with more units"):
        sfvi.fit(model, silos, **said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sfvi.fit(model, silos, **said)


def test_a_private_run_that_breaks_at_once_says_where():
    """Nothing was averaged, so nothing is said of what is left."""

    def population():
        line = two_globals()
        numpyro.factor("root", jax.numpy.sqrt(line[0] - 50.0))
        return line

    options = sfvi.SFVI(privacy=sfvi.UnitPrivacy(clip=1.0, noise_multiplier=10.0))
    with pytest.raises(DivergenceError, match="Round 0 broke") as caught:
        sfvi.fit(sfvi.StructuredModel(population, plain_silo), {"a": rows_data()}, key=0, algorithm=options)
    assert caught.value.fit.privacy.left is None
