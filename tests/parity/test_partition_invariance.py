"""One silo holding all data and any split of it give the same trajectory."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions import constraints

import sfvi
from sfvi.zoo.logistic_mixed import silo as wheeze

from ..helpers import assert_trees_close, bind, run_batched

KEY = jax.random.key(5)
ROUNDS = 1000
SIZES = {1: [537], 2: [300, 237], 7: [76] * 5 + [100, 57], 537: [1] * 537}


def population():
    scale = numpyro.param("scale", 5.0, constraint=constraints.positive)
    beta = numpyro.sample("beta", dist.Normal(0.0, scale).expand([4]).to_event(1))
    return beta, numpyro.sample("omega", dist.Normal(0.0, 10.0))


def trajectory(num_silos, *, merge):
    model = sfvi.StructuredModel(population, wheeze)
    silos, ids = sfvi.data.split_units(sfvi.data.six_cities(), SIZES[num_silos], seed=num_silos)
    algorithm, data, theta = bind(model, silos, unit_ids=ids, optimizer=optax.adam(1e-2))
    server, families, batches = run_batched(model, algorithm, data, theta, KEY, ROUNDS, merge=merge)
    assert all(batch.stacked is not merge or num_silos == 1 for batch in batches)
    order = np.argsort(np.concatenate([ids[name] for name in families]))
    blocks = [family.units["children"] for family in families.values()]
    local = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=-1)[..., order], *blocks)
    return server.shared.family, server.shared.theta, local


@pytest.fixture(scope="module")
def reference():
    return trajectory(1, merge=False)


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "stacked"])
@pytest.mark.parametrize("num_silos", [2, 7, 537])
def test_any_split_gives_the_same_trajectory(reference, num_silos, merge):
    assert_trees_close(trajectory(num_silos, merge=merge), reference, rtol=0, atol=1e-10)
