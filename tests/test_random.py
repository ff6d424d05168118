"""Keys as users give them."""

import jax
import numpy as np
import pytest

from sfvi._random import as_key


@pytest.mark.parametrize("key", [3, np.int64(3), jax.random.key(3), jax.random.PRNGKey(3), np.array([0, 3], np.uint32)])
def test_the_same_key_in_every_form(key):
    np.testing.assert_array_equal(jax.random.key_data(as_key(key)), [0, 3])


def test_keys_of_another_generator_become_threefry_keys():
    one, other = (as_key(jax.random.key(seed, impl="rbg")) for seed in (0, 1))
    assert str(jax.random.key_impl(one)) == "threefry2x32"
    assert np.any(jax.random.key_data(one) != jax.random.key_data(other))
