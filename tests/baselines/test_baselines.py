"""Baselines against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.handlers import seed, substitute, trace

import sfvi
from sfvi.baselines import fed_avg, meta_analysis, nuts

from ..helpers import gamma_data, gamma_model, linear_data, linear_model, linear_posterior, pooled_log_density


def split(data):
    return {"a": {k: v[:5] for k, v in data.items()}, "b": {k: v[5:] for k, v in data.items()}}


def test_nuts_on_silos_is_the_posterior_of_pooled_data():
    """Two silos of a conjugate model: means and sds of the global latents within four standard errors."""
    data = linear_data()
    exact = linear_posterior(data)
    found = nuts(linear_model(), split(data), key=0, num_draws=1500, num_warmup=500)
    columns = found.columns()
    assert found.r_hat < 1.02
    assert list(found.draws) == ["mu", "slope"]
    assert columns.shape == (3000, 2)
    sd = np.sqrt(np.diag(exact.covariance)[:2])
    size = 1000  # effective draws of 3,000, at least
    np.testing.assert_array_less(np.abs(columns.mean(0) - exact.mean[:2]) / sd, 4 / np.sqrt(size))
    np.testing.assert_array_less(np.abs(columns.std(0) / sd - 1), 4 / np.sqrt(2 * size))


def test_nuts_refuses_parameters():
    with pytest.raises(sfvi.ModelError, match="'scale' is a parameter"):
        nuts(gamma_model(), {"a": gamma_data()}, key=0)


def test_one_program_has_the_density_of_pooled_data():
    model, data = linear_model(), linear_data()
    program = model.as_one_program(split(data))
    drawn = trace(seed(program, 0)).get_trace()
    assert {"mu", "slope", "a/b", "b/b"} < set(drawn)
    values = {"mu": 0.3, "slope": -0.2, "b": np.linspace(-1, 1, 12)}
    apart = {"mu": 0.3, "slope": -0.2, "a/b": values["b"][:5], "b/b": values["b"][5:]}
    found = trace(substitute(program, apart)).get_trace()
    total = sum(jnp.sum(s["fn"].log_prob(s["value"])) for s in found.values() if s["type"] == "sample")
    pooled = pooled_log_density(model.population.program, model.silo_program, {}, values, data)
    assert float(total) == pytest.approx(float(pooled), rel=1e-12)


def test_parameters_keep_their_names_in_one_program():
    drawn = trace(seed(gamma_model().as_one_program({"a": gamma_data(), "b": gamma_data(4)}), 0)).get_trace()
    assert {name for name, site in drawn.items() if site["type"] == "param"} == {"scale", "shift"}


def test_meta_analysis_of_gaussians():
    mean, sd = meta_analysis(np.array([[0.0], [3.0]]), np.array([[1.0], [2.0]]))
    assert mean == pytest.approx(3 * 0.25 / 1.25)
    assert sd == pytest.approx(1.25**-0.5)
    with pytest.raises(sfvi.OptionError, match="positive sds"):
        meta_analysis(np.zeros((2, 1)), np.zeros((2, 1)))


def squared(params, batch):
    return 0.5 * jnp.mean((params - batch["y"]) ** 2)


def test_averaging_weights_silos_by_their_rows():
    """Many steps on a quadratic end at each silo's mean, and their average at the mean of all rows."""
    silos = {"a": {"y": np.full(30, 1.0)}, "b": {"y": np.full(10, 5.0)}}
    found = fed_avg(
        squared,
        jnp.zeros(()),
        silos,
        key=0,
        num_rounds=2,
        num_local_steps=200,
        batch_size=4,
        optimizer=optax.sgd(0.1),
    )
    assert float(found) == pytest.approx((30 * 1.0 + 10 * 5.0) / 40, rel=1e-6)


def test_one_step_a_round_is_gradient_descent_on_all_rows():
    """With whole silos of one row each and SGD, averaging after every step is descent of the pooled loss."""
    silos = {"a": {"y": np.array([2.0])}, "b": {"y": np.array([-6.0])}}
    options = {"num_rounds": 3, "num_local_steps": 1, "batch_size": 5, "optimizer": optax.sgd(0.5)}
    found = fed_avg(squared, jnp.zeros(()), silos, key=0, **options)
    assert float(found) == pytest.approx(-2.0 * (1 - 0.5**3))


def test_whole_numbers_beside_fractions_stay_what_they_are():
    silos = {"a": {"y": np.array([1, 1])}, "b": {"y": np.array([0.5, 0.5])}}
    options = {"num_rounds": 1, "num_local_steps": 1, "batch_size": 4, "optimizer": optax.sgd(1.0)}
    assert float(fed_avg(squared, jnp.zeros(()), silos, key=0, **options)) == 0.75


def test_padding_is_never_drawn(float32):
    """A silo of one row beside one of a thousand: its padding would be zeros."""
    silos = {"a": {"y": np.ones(1000, np.float32)}, "b": {"y": np.ones(1, np.float32)}}
    options = {"num_rounds": 1, "num_local_steps": 50, "batch_size": 8, "optimizer": optax.sgd(1.0)}
    found = fed_avg(squared, jnp.zeros((), jnp.float32), silos, key=0, **options)
    assert found.dtype == jnp.float32
    assert float(found) == 1.0


@pytest.mark.parametrize(
    ("silos", "options", "error", "message"),
    [
        ({"a": {"y": np.ones(0)}}, {}, sfvi.DataError, "silo 'a' has arrays of"),
        ({"a": {"x": np.ones(2), "y": np.ones(3)}}, {}, sfvi.DataError, r"\[2, 3\] rows"),
        ({}, {}, sfvi.DataError, "no silos"),
        ({"a": {"y": np.array([np.nan])}}, {}, sfvi.DataError, "not finite"),
        ({"a": {"y": np.ones(2)}, "b": {"z": np.ones(2)}}, {}, sfvi.DataError, "'b' are not like those of 'a'"),
        ({"a": {"y": np.ones((2, 3))}, "b": {"y": np.ones((2, 1))}}, {}, sfvi.DataError, "'b' are not like"),
        ({"a": {"y": np.ones(2)}}, {"num_rounds": 0}, sfvi.OptionError, "num_rounds is 0"),
        ({"a": {"y": np.ones(2)}}, {"batch_size": 1.5}, sfvi.OptionError, "batch_size is 1.5"),
    ],
)
def test_what_cannot_be_averaged_is_refused(silos, options, error, message):
    usual = {"num_rounds": 1, "num_local_steps": 1, "batch_size": 1, "optimizer": optax.sgd(1.0)}
    with pytest.raises(error, match=message):
        fed_avg(squared, jnp.zeros(()), silos, key=0, **{**usual, **options})


def silo_with_own_program(mu, data):
    numpyro.sample("y", dist.Normal(mu, 1.0).expand([3]).to_event(1), obs=data["y"])


def test_silos_with_programs_of_their_own_make_one_program():
    model = sfvi.StructuredModel(
        lambda: numpyro.sample("mu", dist.Normal(0.0, 1.0)), {"a": silo_with_own_program, "b": silo_with_own_program}
    )
    data = {"a": {"y": np.ones(3)}, "b": {"y": np.zeros(3)}}
    drawn = trace(seed(model.as_one_program(data), jax.random.key(0))).get_trace()
    assert {"mu", "a/y", "b/y"} == set(drawn)
