"""Six cities with the paper's family, against the known optimum of that family."""

import numpy as np
import optax

import sfvi
from sfvi import bounds, families

# Optimum of the family (mean, sd) for beta_0..beta_3 and omega.
MEAN = np.array([-2.993, 0.446, -0.213, 0.104, -0.675])
SD = np.array([0.160, 0.258, 0.085, 0.137, 0.039])
ROUNDS = 12_000
PAPER = {"bound": bounds.elbo(), "local_family": families.block(coupling="mean")}


def test_two_silos_find_the_optimum_of_the_family(float32):
    silos, _ = sfvi.data.split_units(sfvi.data.six_cities(), {"north": 300, "south": 237}, seed=1)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, ROUNDS))
    algorithm = sfvi.SFVI(optimizer=optimizer, **PAPER)
    fit = sfvi.fit(sfvi.zoo.logistic_mixed_model(), silos, key=0, num_rounds=ROUNDS, algorithm=algorithm)
    mean, sd = map(np.asarray, fit.posterior.family.marginals())
    np.testing.assert_array_less(np.abs(mean - MEAN) / SD, 0.15)
    np.testing.assert_array_less(np.abs(sd / SD - 1), 0.10)


def test_the_stopping_rule_ends_there(float32):
    silos, _ = sfvi.data.split_units(sfvi.data.six_cities(), {"north": 300, "south": 237}, seed=1)
    run = {"num_rounds": 60_000, "until_converged": True, "algorithm": sfvi.SFVI(**PAPER)}
    fit = sfvi.fit(sfvi.zoo.logistic_mixed_model(), silos, key=0, **run)
    assert fit.convergence.converged
    assert len(fit.elbo) < 60_000
    mean, sd = map(np.asarray, fit.posterior.family.marginals())
    np.testing.assert_array_less(np.abs(mean - MEAN) / SD, 0.3)
    np.testing.assert_array_less(np.abs(sd / SD - 1), 0.15)
