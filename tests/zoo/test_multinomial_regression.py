"""The multinomial regression against its own density, and as empirical Bayes."""

import jax
import numpy as np
import pytest
from scipy import special, stats

import sfvi
from sfvi.zoo import multinomial_regression

from ..helpers import pooled_log_density


def simulated(num_rows=40, num_features=3, num_classes=4, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_rows, num_features))
    return {"x": x, "y": generator.integers(num_classes, size=num_rows)}


def test_the_density_is_that_of_the_docstring():
    model, data = multinomial_regression(num_features=3, num_classes=4), simulated()
    generator = np.random.default_rng(1)
    weights, bias = generator.normal(size=(4, 3)), generator.normal(size=4)
    theta = {"sigma_W": 0.7, "sigma_b": 1.9}
    found = pooled_log_density(model.population.program, model.silo_program, theta, {"W": weights, "b": bias}, data)
    log_p = special.log_softmax(data["x"] @ weights.T + bias, axis=1)
    expected = stats.norm.logpdf(weights, 0, 0.7).sum() + stats.norm.logpdf(bias, 0, 1.9).sum()
    expected += log_p[np.arange(40), data["y"]].sum()
    assert float(found) == pytest.approx(expected, rel=1e-10)


def test_learned_scales_maximize_the_bound_of_a_prior():
    """At the optimum sigma^2 is the mean of E[W^2]: the closed form of empirical Bayes with a Gaussian q."""
    data = simulated(300)
    fit = sfvi.fit(
        multinomial_regression(num_features=3, num_classes=4),
        {"a": {k: v[:200] for k, v in data.items()}, "b": {k: v[200:] for k, v in data.items()}},
        key=0,
        num_rounds=4000,
    )
    draws = fit.posterior.sample(jax.random.key(1), 4000)
    for scale, site in (("sigma_W", "W"), ("sigma_b", "b")):
        assert float(fit.theta[scale]) == pytest.approx(float(np.mean(np.asarray(draws[site]) ** 2) ** 0.5), rel=0.05)


def test_minibatches_have_the_expected_bound():
    """A bound from batches of 8 of 40 rows, averaged over 2,000 rounds that do not move, is that of all rows."""
    import optax

    data, still = simulated(), optax.sgd(0.0)
    values = {}
    for batch in (8, None):
        model = multinomial_regression(num_features=3, num_classes=4, batch_size=batch, learn_scales=False)
        fit = sfvi.fit(model, {"a": data}, key=0, num_rounds=2000, algorithm=sfvi.SFVI(optimizer=still))
        values[batch] = fit.elbo
    error = np.hypot(*(v.std() / len(v) ** 0.5 for v in values.values()))
    assert abs(values[8].mean() - values[None].mean()) < 4 * error
    assert values[8].std() > 1.1 * values[None].std()
