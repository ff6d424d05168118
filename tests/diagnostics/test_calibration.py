"""Simulation-based calibration on a model with an exact posterior, and on the same made too narrow."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import sfvi


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 1.0))


def silo(mu, data):
    with numpyro.plate("units", data["x"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 0.5))
        numpyro.sample("y", dist.Normal(b * data["x"], 1.0), obs=data["y"])


SILOS = {name: {"x": np.ones(4) + i, "y": np.zeros(4)} for i, name in enumerate(("a", "b"))}


def calibrate(**options):
    model = sfvi.StructuredModel(population, silo)
    common = {"key": 0, "num_simulations": 30, "num_rounds": 250, "num_draws": 200}
    return sfvi.simulation_based_calibration(model, SILOS, **{**common, **options})


def test_exact_posteriors_are_calibrated():
    algorithm = sfvi.SFVI(bound=sfvi.bounds.elbo(), optimizer=optax.adam(0.05))
    found = calibrate(algorithm=algorithm)
    assert found.trust == "fine", found.verdict
    assert found.ranks.shape == (30, 1)
    assert abs(found.z_scores["mu"].std() - 1) < 4 / np.sqrt(2 * 30)
    found.plot().clear()


def test_fits_that_stop_at_the_start_are_not():
    found = calibrate(num_rounds=1, num_simulations=20)
    assert found.trust == "do not trust"
    assert "'mu' is not calibrated in 20 simulations" in found.verdict


def test_what_has_no_prior_is_refused():
    def learned(mu, data):
        scale = numpyro.param("scale", 1.0)
        numpyro.sample("y", dist.Normal(mu + scale, 1.0).expand([4]).to_event(1), obs=data["y"])

    model = sfvi.StructuredModel(population, learned)
    with pytest.raises(sfvi.ModelError, match="'scale' has no prior"):
        sfvi.simulation_based_calibration(model, SILOS, key=0)
    with pytest.raises(sfvi.OptionError, match="num_simulations is 3"):
        calibrate(num_simulations=3)
