"""How much of the noise is left in a result is known before a run, and said."""

import logging
import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import sfvi
from sfvi import families, participation
from sfvi.algorithms import noise_left

from .models import plain_silo, rows_data, two_globals
from .test_budget import run

ROUNDS, KEYS = 400, 30


def normal_mean():
    def population():
        return numpyro.sample("mean", dist.Normal(0.0, 10.0))

    def silo(mean, data):
        with numpyro.plate("people", data["y"].shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=data["y"])

    return sfvi.StructuredModel(population, silo)


def planned(**options):
    """Options of a run with noise, and what is left of it with three silos."""
    chosen = sfvi.SFVI(**{"privacy": sfvi.UnitPrivacy(clip=0.5, noise_multiplier=4.0, sampling_rate=0.25)} | options)
    family = (chosen.global_family or families.full())(jax.numpy.zeros(2), 0.1)
    return noise_left(chosen, family, num_silos=3, num_rounds=ROUNDS)


def test_errors_of_a_conjugate_model_are_what_was_said():
    """Its posterior is known, and no unit is shortened: errors are the noise's, within what 30 runs can tell."""
    silos = {name: {"y": np.random.default_rng(seed).normal(0.1, 1.0, 500)} for seed, name in enumerate("abc")}
    total = sum(silo["y"].sum() for silo in silos.values())
    exact, sd = total / (1500 + 0.01), (1500 + 0.01) ** -0.5
    options = sfvi.SFVI(privacy=sfvi.UnitPrivacy(clip=0.2, noise_multiplier=30.0))
    errors = []
    for key in range(KEYS):
        fit = sfvi.fit(normal_mean(), silos, key=key, num_rounds=ROUNDS, algorithm=options)
        errors.append((float(fit.posterior.shared.family.loc[0]) - exact) / sd)
    said = fit.privacy.left
    assert said == pytest.approx(30 * 0.2 * 3**0.5 * (4 / 3) ** 0.5 / (0.6 * ROUNDS) ** 0.5)
    assert 0.7 * said < np.sqrt(np.mean(np.square(errors))) < 1.6 * said  # four standard errors, and scales are learned


def test_what_it_depends_on():
    alone = planned()
    assert planned(privacy=sfvi.UnitPrivacy(clip=0.5, noise_multiplier=4.0)) == pytest.approx(alone / 4)
    shared = sfvi.UnitPrivacy(clip=0.5, noise_multiplier=4.0, sampling_rate=0.25, shared_by=3)
    assert planned(privacy=shared) == pytest.approx(alone / 3**0.5)
    assert planned(global_family=families.mean_field()) == alone
    for unknown in (
        {"privacy": None},
        {"privacy": sfvi.UnitPrivacy(clip=0.5, noise_multiplier=0.0)},
        {"privacy": sfvi.SiloPrivacy(clip=0.5, noise_multiplier=4.0)},
        {"global_family": families.flow()},
        {"participation": participation.count(2)},
    ):
        assert planned(**unknown) is None


def test_a_run_that_will_tell_little_says_so_before_it_begins():
    model, silos = sfvi.StructuredModel(two_globals, plain_silo), {"a": rows_data(seed=0), "b": rows_data(seed=1)}

    def fit(noise, callback=None):
        privacy = sfvi.UnitPrivacy(clip=1.0, noise_multiplier=noise)
        return sfvi.fit(model, silos, key=0, num_rounds=20, algorithm=sfvi.SFVI(privacy=privacy), callback=callback)

    def too_early(progress):
        raise AssertionError(f"{progress} came before the warning")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"error of about 4\.7 posterior sds or more"):
            fit(10.0, too_early)
        assert "an error of about 0.47 posterior sds" in str(fit(1.0).privacy)


def test_a_deployed_run_says_so_at_the_server(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "sfvi"):
        fit = run(tmp_path)
    assert fit.privacy.left > 1
    assert sum("the noise will leave an error" in line for line in caplog.messages) == 1
