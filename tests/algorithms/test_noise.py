"""Local noise: standard normal, a function of who the unit is, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from sfvi.algorithms.noise import local_noise

from ..helpers import gamma_data, gamma_model

KEY = jax.random.key(0)


def draw(silo, round=0, num_samples=1, dtype=jnp.float64, key=KEY):
    return local_noise(key, jnp.asarray(round), silo, {}, num_samples, dtype).units["units"]


def silo_data(name="a", n=11, unit_ids=None):
    return gamma_model().silo_data(name, gamma_data(n), unit_ids=unit_ids)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_is_standard_normal(dtype):
    noise = np.asarray(draw(silo_data(n=2000), num_samples=10, dtype=dtype))
    assert noise.dtype == dtype
    assert noise.shape == (10, 2, 2000)
    assert scipy.stats.kstest(noise.ravel().astype(float), "norm").pvalue > 0.01
    lags = [
        np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1],
        np.corrcoef(noise[:, 0].ravel(), noise[:, 1].ravel())[0, 1],
    ]
    np.testing.assert_array_less(np.abs(lags), 4 / np.sqrt(noise[:, 0].size))


def test_differs_between_silos_rounds_and_keys():
    base = draw(silo_data())
    others = [draw(silo_data("b")), draw(silo_data(), round=1), draw(silo_data(), key=jax.random.key(1))]
    for other in others:
        assert not np.any(np.isclose(base, other, atol=1e-12))


def test_follows_the_position_when_a_silo_grows():
    np.testing.assert_array_equal(draw(silo_data(n=11)), draw(silo_data(n=20))[..., :11])


def test_follows_the_id_whichever_silo_holds_the_unit():
    ids = np.array([4, 9, 2, 7, 1])
    one = draw(silo_data("a", n=5, unit_ids=ids))
    other = draw(silo_data("b", n=3, unit_ids=ids[[3, 0, 4]]))
    np.testing.assert_array_equal(one[..., [3, 0, 4]], other)
