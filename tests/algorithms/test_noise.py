"""Noise: standard normal, a function of who the unit is, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.extend.random import threefry_2x32

from sfvi.algorithms.noise import MANY, _encrypt, global_noise, local_noise

from ..helpers import gamma_data, gamma_model

KEY = jax.random.key(0)


def draw(silo, round=0, num_samples=1, dtype=jnp.float64, key=KEY):
    return local_noise(key, jnp.asarray(round), silo, {}, num_samples, dtype).units["units"]


def is_normal(draws):
    """No Kolmogorov-Smirnov test of many speaks against it at 1%, by Bonferroni."""
    values = [scipy.stats.kstest(np.asarray(noise, float).ravel(), "norm").pvalue for noise in draws]
    return min(values) > 0.01 / len(values)


def silo_data(name="a", n=11, unit_ids=None):
    return gamma_model().silo_data(name, gamma_data(n), unit_ids=unit_ids)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_is_standard_normal(dtype):
    noise = np.asarray(draw(silo_data(n=2000), num_samples=10, dtype=dtype))
    assert noise.dtype == dtype
    assert noise.shape == (10, 2, 2000)
    assert is_normal(draw(silo_data(n=2000), dtype=dtype, key=jax.random.key(seed)) for seed in range(20))
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_global_noise_is_standard_normal_and_follows_the_key(dtype):
    noise = np.asarray(global_noise(KEY, 20, 1000, dtype))
    assert noise.dtype == dtype
    assert is_normal(global_noise(jax.random.key(seed), 1, 4000, dtype) for seed in range(20))
    assert not np.any(np.isclose(noise, global_noise(jax.random.key(1), 20, 1000, dtype), atol=1e-12))


def test_generator_is_jaxs_own():
    words = jnp.arange(14, dtype=jnp.uint32) * np.uint32(0x9E3779B9)
    key = jax.random.key_data(jax.random.key(12345))
    ours = jnp.concatenate(_encrypt((key[0], key[1]), words[:7], words[7:]))
    np.testing.assert_array_equal(ours, threefry_2x32(key, words))


def test_noise_of_silos_side_by_side_is_made_once():
    """In one branch for all, which the compiler cannot look into; with the digits of each by itself."""
    keys = jax.random.split(jax.random.key(3), 4)

    def noise(key):
        return global_noise(key, 2, MANY, jnp.float64)

    together = jax.vmap(jax.vmap(noise))
    found = together(keys.reshape(2, 2)).reshape(4, 2, MANY)
    np.testing.assert_array_equal(found, jnp.stack([noise(key) for key in keys]))
    made = [step for step in jax.make_jaxpr(together)(keys.reshape(2, 2)).eqns if step.outvars[0].aval.size == 8 * MANY]
    assert made[0].primitive.name == "cond"
