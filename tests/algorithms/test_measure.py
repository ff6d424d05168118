"""Units of noise: a root of the covariance for means, and the same root for what changes it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from sfvi.algorithms.measure import Measure, moved
from sfvi.families import BlockGaussian, FullGaussian, LowRankGaussian, MeanFieldGaussian
from sfvi.families.triangular import pack
from sfvi.objectives import Shared

from ..helpers import assert_trees_close

SIZE = 4


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


FAMILIES = {
    "mean field": MeanFieldGaussian(normal(0, SIZE), normal(1, SIZE)),
    "full": FullGaussian(normal(0, SIZE), normal(1, SIZE), 3 * normal(2, 6)),
    "low rank": LowRankGaussian(normal(0, SIZE), normal(1, SIZE), normal(2, SIZE, 2)),
    "low rank, no factor yet": LowRankGaussian(normal(0, SIZE), normal(1, SIZE), jnp.zeros((SIZE, 2))),
}
OWN = BlockGaussian(normal(3, 2, 1), normal(4, 2, 1), normal(5, 1, 1), normal(6, SIZE, 2, 1), None)


@pytest.mark.parametrize("own", [None, OWN], ids=["no latents of the silo", "own latents"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_there_and_back(family, own):
    shared = Shared(family, {"theta": normal(7)}, None)
    flat, rebuild = ravel_pytree((shared, own))
    gradient = normal(8, flat.size)
    units = Measure(shared, own)
    assert_trees_close(ravel_pytree(units.back(units.into(rebuild(gradient))))[0], gradient)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_noise_in_means_is_noise_in_posterior_sds(family):
    """White noise in these units, times the steps that go with them, has the covariance of q."""
    zero = jax.tree.map(jnp.zeros_like, family)
    at = jax.vmap(lambda unit: moved(family, eqx.tree_at(lambda tree: tree.loc, zero, unit)).loc)
    root = at(jnp.eye(SIZE)).T
    spread = jax.jacobian(family.sample)(jnp.zeros(family.noise_size))
    assert_trees_close(root @ root.T, spread @ spread.T)


def test_a_full_covariance_moves_by_its_own_root():
    """From A to A (I + M)."""
    family, change = FAMILIES["full"], 0.3 * jnp.tanh(jnp.tril(normal(9, SIZE, SIZE)))
    step = FullGaussian(jnp.zeros(SIZE), jnp.diag(change), pack(change))

    def root(family):
        return jax.jacobian(family.sample)(jnp.zeros(SIZE))

    after = jax.tree.map(jnp.add, family, moved(family, step))
    assert_trees_close(root(after), root(family) @ (jnp.eye(SIZE) + change))
