"""Programs that call LAPACK run on one thread: on several, jaxlib's kernels wait for each other for good."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import sfvi
from sfvi._compile import calls_lapack, on_one_thread
from sfvi.engines import batching, loop

from .helpers import bind, linear_data, linear_model


def solve(root, values):
    return jax.scipy.linalg.solve_triangular(root, values, lower=True)


def test_kernels_are_found_however_deep_they_lie():
    root = jnp.eye(2)

    def deep(values):
        return jax.lax.fori_loop(
            0, 3, lambda _, v: jax.lax.cond(v[0] > 0, jax.jit(lambda w: solve(root, w)), abs, v), values
        )

    assert calls_lapack(deep, jnp.ones(2))
    assert not calls_lapack(jnp.linalg.norm, jnp.ones(2))


def test_rounds_that_call_them_are_found():
    def correlated(globals_, data):
        with numpyro.plate("units", data["y"].shape[0]):
            b = numpyro.sample("b", dist.MultivariateNormal(jnp.full(2, globals_[0]), jnp.eye(2)))
            numpyro.sample("y", dist.Normal(b[:, :1], 0.5).to_event(1), obs=data["y"])

    for model, expected in (
        (sfvi.StructuredModel(linear_model().population.program, correlated), True),
        (linear_model(), False),
    ):
        algorithm, data, theta = bind(model, {"a": linear_data(5)})
        numbers = {name: silo.num_units for name, silo in data.items()}
        rounds = loop.build(algorithm, batching.plan(model, data, theta, merge=True), numbers)
        assert rounds.calls_lapack(jax.random.key(0), rounds.init(jax.random.key(0), theta)) == expected


def test_one_thread_gives_the_same():
    values = jnp.arange(6.0).reshape(3, 2)
    root = jnp.tile(jnp.array([[2.0, 0.0], [1.0, 3.0]]), (3, 1, 1))
    assert jnp.array_equal(on_one_thread(jax.vmap(solve))(root, values), jax.vmap(solve)(root, values))
