"""What passes between server and silos."""

import jax
import jax.numpy as jnp
import pytest
from jax.flatten_util import ravel_pytree

import sfvi
from sfvi.engines.exactness import stack

from ..helpers import assert_trees_close, bind, gamma_data, gamma_model, unit_numbers


def shapes(tree):
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in jax.tree.flatten_with_path(tree)[0]}


def test_reply_and_broadcast_hold_only_shared_quantities():
    """Their sizes depend on the global latents and theta, never on the units of the silo."""
    sizes = []
    for n in (3, 50):
        algorithm, data, theta = bind(gamma_model(), {"a": gamma_data(n)})
        server = algorithm.server_init(jax.random.key(0), theta, unit_numbers(data))
        broadcast = algorithm.broadcast(jax.random.key(0), server)
        state = algorithm.silo_init(jax.random.key(1), broadcast, data["a"])
        _, reply, _ = jax.jit(algorithm.silo_step)(jax.random.key(1), state, broadcast, data["a"])
        sizes.append((shapes(reply), shapes(broadcast)))
    assert sizes[0] == sizes[1]
    assert sizes[0][0] == {
        ".gradient.family.loc": (3,),
        ".gradient.family.log_scale": (3,),
        ".gradient.family.lower": (3,),
        ".gradient.theta['scale']": (),
        ".gradient.theta['shift']": (),
    }
    assert set(sizes[0][1]) == {
        ".shared.family.loc",
        ".shared.family.log_scale",
        ".shared.family.lower",
        ".shared.theta['scale']",
        ".shared.theta['shift']",
        ".key",
        ".round",
    }


def test_default_global_family_depends_on_the_dimension():
    import numpyro
    import numpyro.distributions as dist

    import sfvi

    def model(size):
        def population():
            return numpyro.sample("w", dist.Normal(0.0, 1.0).expand([size]).to_event(1))

        def silo(w, data):
            numpyro.sample("y", dist.Normal(w.sum(), 1.0), obs=data["y"])

        return sfvi.StructuredModel(population, silo)

    for size, family in [(200, sfvi.families.FullGaussian), (201, sfvi.families.MeanFieldGaussian)]:
        state = sfvi.SFVI().bind(model(size)).server_init(jax.random.key(0), {}, jnp.ones(1))
        assert isinstance(state.shared.family, family)


def shaken(tree):
    """Away from where fits start: couplings are zero there."""
    vector, rebuild = ravel_pytree(tree)
    return rebuild(vector + 0.3 * jax.random.normal(jax.random.key(2), vector.shape))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_samples": 3, "estimator": "reparameterization"},
        {"bound": sfvi.bounds.elbo(), "global_family": sfvi.families.mean_field()},
        {"bound": sfvi.bounds.locally_enhanced(3), "global_family": sfvi.families.low_rank(rank=1)},
        {"local_family": sfvi.families.block(coupling="mean")},
    ],
)
def test_steps_together_are_the_steps_of_each(options):
    """The sum of the replies and of the terms, and every silo's own state."""
    algorithm, data, theta = bind(
        gamma_model(), {name: gamma_data(4, seed=i) for i, name in enumerate("abc")}, **options
    )
    key = jax.random.key(1)
    server = algorithm.server_init(jax.random.key(0), theta, unit_numbers(data))
    broadcast = algorithm.broadcast(jax.random.key(0), server)
    broadcast = broadcast._replace(shared=shaken(broadcast.shared))
    states = [algorithm.silo_init(key, broadcast, silo) for silo in data.values()]
    states = [state._replace(family=shaken(state.family)) for state in states]
    step = jax.jit(algorithm.silo_step)
    each = stack([step(key, state, broadcast, silo) for state, silo in zip(states, data.values(), strict=True)])
    together = jax.jit(algorithm.silo_steps)(key, stack(states), broadcast, stack(list(data.values())))
    expected = (each[0], *jax.tree.map(lambda leaf: leaf.sum(0), each[1:]))
    assert_trees_close(together, expected, rtol=1e-10)
