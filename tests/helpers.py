"""Models, reference computations and comparisons that several tests use."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints
from numpyro.infer.util import log_density

import sfvi
from sfvi import families
from sfvi.algorithms import participation
from sfvi.engines import batching, loop

GAUSSIAN_FAMILIES = {
    "mean_field": families.mean_field(),
    "full": families.full(),
    "low_rank": families.low_rank(rank=2),
}
GLOBAL_FAMILIES = {**GAUSSIAN_FAMILIES, "flow": families.flow(num_layers=1, width=6, knots=4)}
LOCAL_FAMILIES = {
    f"{within}-{coupling}": families.block(within=within, coupling=coupling)
    for within in ("diagonal", "full")
    for coupling in ("none", "mean", "mean_and_scale")
}


def assert_trees_close(actual, expected, *, rtol=1e-10, atol=1e-10):
    left, right = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


def perturb(tree, seed, scale=0.3):
    """Move every leaf of a family away from its symmetric start."""
    leaves, structure = jax.tree.flatten(tree)
    generator = np.random.default_rng(seed)
    return structure.unflatten([leaf + scale * generator.normal(size=leaf.shape) for leaf in leaves])


# A model with everything: constrained global and local sites, two local sites per unit, theta in both programs.


def gamma_population():
    scale = numpyro.param("scale", 1.5, constraint=constraints.positive)
    beta = numpyro.sample("beta", dist.Normal(0.0, scale).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    return beta, sigma


def gamma_silo(globals_, data):
    beta, sigma = globals_
    shift = numpyro.param("shift", 0.2)
    with numpyro.plate("units", data["x"].shape[0]):
        a = numpyro.sample("a", dist.Normal(shift, sigma))
        r = numpyro.sample("r", dist.Gamma(2.0, 1.0 + sigma))
        rate = jnp.exp(data["x"] @ beta + 0.1 * a) * r
        numpyro.sample("y", dist.Poisson(rate), obs=data["y"])


def gamma_model():
    return sfvi.StructuredModel(gamma_population, gamma_silo)


def gamma_data(n=11, seed=0):
    generator = np.random.default_rng(seed)
    return {"x": generator.normal(size=(n, 2)), "y": generator.poisson(2.0, size=n)}


# A linear Gaussian hierarchy with a closed-form posterior that the structured family contains.


def linear_population():
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    return mu, slope


def linear_silo(globals_, data):
    mu, slope = globals_
    with numpyro.plate("units", data["x"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 0.7))
        mean = b[:, None] + slope * data["x"]
        numpyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=data["y"])


def linear_model():
    return sfvi.StructuredModel(linear_population, linear_silo)


def linear_data(n=12, rows=3, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n, rows))
    b = 1.3 + 0.7 * generator.normal(size=n)
    return {"x": x, "y": b[:, None] - 0.4 * x + 0.5 * generator.normal(size=(n, rows))}


class Exact(NamedTuple):
    mean: np.ndarray
    covariance: np.ndarray
    log_evidence: float


def linear_posterior(data) -> Exact:
    """Posterior of (mu, slope, b_1..b_n) and evidence by Gaussian conditioning, densely."""
    n, rows = data["x"].shape
    prior = np.zeros((2 + n, 2 + n))
    loading = np.zeros((n, 2))
    loading[:, 0] = 1.0
    top = np.diag([4.0, 1.0])
    prior[:2, :2] = top
    prior[2:, :2] = loading @ top
    prior[:2, 2:] = prior[2:, :2].T
    prior[2:, 2:] = loading @ top @ loading.T + 0.49 * np.eye(n)
    design = np.zeros((n * rows, 2 + n))
    design[:, 1] = data["x"].ravel()
    design[np.arange(n * rows), 2 + np.repeat(np.arange(n), rows)] = 1.0
    marginal = design @ prior @ design.T + 0.25 * np.eye(n * rows)
    gain = prior @ design.T @ np.linalg.inv(marginal)
    y = data["y"].ravel()
    covariance = prior - gain @ design @ prior
    _, log_det = np.linalg.slogdet(2 * np.pi * marginal)
    return Exact(gain @ y, covariance, float(-0.5 * (log_det + y @ np.linalg.solve(marginal, y))))


# Rounds by hand, silo by silo: the reference against which batching and engines are compared.


def bind(model, silos, *, unit_ids=None, algorithm=sfvi.SFVI, **options):
    data = {
        name: model.silo_data(name, silos[name], unit_ids=None if unit_ids is None else unit_ids[name])
        for name in sorted(silos)
    }
    theta = model.initial_theta(jax.random.key(0), data)
    return algorithm(**options).bind(model), data, theta


def unit_numbers(data):
    return jnp.stack([silo.num_units for silo in data.values()])


def everyone(number):
    return participation.Participants(jnp.arange(number), jnp.ones(number))


def run_one_by_one(algorithm, data, theta, key, num_rounds):
    """Every silo by itself, replies stacked by name: what a deployment does."""
    server_key, silo_key = loop.keys(key)
    tell = jax.jit(lambda server: algorithm.broadcast(server_key, server))
    draw = jax.jit(lambda server: algorithm.participants(server_key, server))
    start = jax.jit(lambda broadcast, silo: algorithm.silo_init(silo_key, broadcast, silo))
    step = jax.jit(lambda state, broadcast, silo: algorithm.silo_step(silo_key, state, broadcast, silo))
    finish = jax.jit(lambda state, broadcast, silo: algorithm.silo_finish(silo_key, state, broadcast, silo))
    server_step, names = jax.jit(algorithm.server_step), list(data)
    server = algorithm.server_init(server_key, theta, unit_numbers(data))
    states = {name: start(tell(server), silo) for name, silo in data.items()}
    for _ in range(num_rounds):
        broadcast, drawn = tell(server), draw(server)
        present = [int(i) for i, weight in zip(*drawn, strict=True) if weight > 0]
        replies = []
        for name in (names[i] for i in present):
            states[name], reply, _ = step(states[name], broadcast, data[name])
            replies.append(reply)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies)
        weights = jnp.array([weight for weight in drawn.weight if weight > 0])
        server, _ = server_step(server, broadcast, stacked, participation.Participants(jnp.array(present), weights))
    return server, {name: finish(states[name], tell(server), data[name]) for name in names}


def run_batched(model, algorithm, data, theta, key, num_rounds, *, merge):
    """The in-process engine's way, returning the families by silo too."""
    batches = batching.plan(model, data, theta, merge=merge)
    rounds = loop.build(algorithm, batches, {name: silo.num_units for name, silo in data.items()})
    state = rounds.init(key, theta)
    done = 0
    while done < num_rounds:
        size = min(loop.MAX_CHUNK, num_rounds - done)
        state = rounds.run(key, state, jnp.asarray(size)).state
        done += size
    families_ = {}
    for batch, family in zip(batches, rounds.finish(key, state), strict=True):
        families_ |= batching.local_families(batch, family)
    return state.server, families_, batches


def pooled_log_density(population, silo, theta, values, data):
    """NumPyro's own log joint at constrained values, for comparison with ours."""

    def joint():
        silo(population(), data)

    return log_density(joint, (), {}, {**theta, **values})[0]


ASCENT = optax.sgd(1.0)  # a step by exactly the gradient
