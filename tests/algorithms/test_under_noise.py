"""Steps under noise: what is left of the noise is as much as averages over the rounds leave."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfvi
from sfvi import _optim
from sfvi.algorithms.measure import Measure
from sfvi.algorithms.options import falling_to_zero
from sfvi.algorithms.under_noise import average, under_noise
from sfvi.families import FullGaussian, MeanFieldGaussian
from sfvi.objectives import Shared

ROUNDS, NOISE, REPLICATES = 2000, 8.0, 200
MEAN, ROOT = jnp.array([3.0, -1.0, 0.5]), jnp.array([[0.05, 0.0, 0.0], [0.2, 0.1, 0.0], [-0.3, 0.3, 0.4]])


def negative_divergence(shared, root):
    r"""Of $\mathrm{N}(m, \Sigma)$, whose precision in these units is far from I at the start."""
    family = shared.family
    ours = jax.jacobian(family.sample)(jnp.zeros(3))
    precision = jnp.linalg.inv(root @ root.T)
    distance = family.loc - MEAN
    spread = jnp.trace(precision @ (ours @ ours.T))
    return -0.5 * (distance @ precision @ distance + spread) + jnp.sum(family.log_scale)


def run(optimizer, noise=NOISE, root=ROOT):
    """Where means end, in posterior sds, and how far logarithms of sds are off."""
    start = Shared(FullGaussian(jnp.zeros(3), jnp.full(3, jnp.log(0.1)), jnp.zeros(3)), {}, None)

    def one(carry, key):
        shared, state = carry
        measure, gradient = Measure(shared, None), jax.grad(negative_divergence)(shared, root)
        blurred = measure.into((gradient, None)) + noise * jax.random.normal(key, (9,))
        return _optim.ascend(optimizer, measure.back(blurred)[0], state, shared), None

    @jax.jit
    @jax.vmap
    def end(key):
        keys = jax.random.split(key, ROUNDS)
        (shared, _), _ = jax.lax.scan(one, (start, _optim.init(optimizer, start)), keys)
        mean, sd = shared.family.marginals()
        return jnp.linalg.solve(root, mean - MEAN), jnp.log(sd / jnp.linalg.norm(root, axis=1))

    return map(np.asarray, end(jax.random.split(jax.random.key(0), REPLICATES)))


def left(noise):
    return average(sfvi.UnitPrivacy(clip=1.0, noise_multiplier=noise), num_silos=1, num_rounds=ROUNDS)


@pytest.mark.parametrize("noise", [2.0, NOISE, 30.0])
def test_what_is_left_of_the_noise(noise):
    """As much as `average` says if scales were known all the time; hardly more, though they are not. However loud it
    is: they start 60 posterior sds away, and arrive."""
    means, log_sds = run(under_noise(ROUNDS), noise)
    expected = left(noise)
    assert 0.9 * expected < np.sqrt(np.mean(means**2)) < 1.25 * expected
    assert np.sqrt(np.mean(log_sds**2)) < 0.75 * expected


@pytest.mark.parametrize("noise", [2.0, NOISE])
def test_noise_does_not_make_sds_shrink(noise):
    """If A moved by steps of its own, sds would be too small by 1% and by 16%."""
    _, log_sds = run(under_noise(ROUNDS), noise)
    error = log_sds.std(axis=0) / np.sqrt(REPLICATES)
    assert np.all(log_sds.mean(axis=0) > 2 * error)
    assert np.all(log_sds.mean(axis=0) < 0.1)


@pytest.mark.parametrize(("apart", "noise"), [(0.04, 0.5), (0.04, 2.0), (0.01, 2.0)])
def test_strong_correlations_change_nothing(apart, noise):
    """As of an intercept and the slope of a covariate that is far from zero. In units of single parameters scales run
    away here: their curvature is that of an effect whose others are known. With steps to first order they shrink."""
    root = jnp.array([[1.0, 0.0, 0.0], [-1.0, apart, 0.0], [0.5, 0.5, 0.7]])
    means, log_sds = run(under_noise(ROUNDS), noise, root=root)
    assert np.sqrt(np.mean(means**2)) < 1.5 * left(noise)
    assert np.sqrt(np.mean(log_sds**2)) < 1.5 * left(noise)


def test_adam_leaves_more():
    """So that the default is worth its name."""
    rivals = [np.sqrt(np.mean(next(run(o)) ** 2)) for o in (under_noise(ROUNDS), optax.adam(falling_to_zero(ROUNDS)))]
    assert rivals[0] < 0.7 * rivals[1]


NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(20)
EFFECTS = jnp.array([1.9, -1.2, 0.4, -0.9])


def of_a_variance_component(shared):
    """The ELBO of the log sd of four effects, each measured with an error of 0.2: flat where the sd is nearly zero."""
    mean, log_sd = shared.family.loc[0], shared.family.log_scale[0]

    def density(u):
        variance = 0.2**2 + jnp.exp(2 * u)
        return -0.5 * jnp.sum(jnp.log(variance) + EFFECTS**2 / variance) - 0.5 * jnp.exp(2 * u) + u

    return jax.vmap(density)(mean + jnp.exp(log_sd) * NODES) @ WEIGHTS / WEIGHTS.sum() + log_sd


def test_a_variance_component_is_not_lost():
    """Where means may wander by ten sds and scales by one, its errors are 11 sds."""
    rounds, noise = 5000, 80.0
    start = Shared(MeanFieldGaussian(jnp.zeros(1), jnp.full(1, jnp.log(0.1))), {}, None)

    def one(optimizer, size):
        def step(carry, key):
            shared, state = carry
            measure, gradient = Measure(shared, None), jax.grad(of_a_variance_component)(shared)
            blurred = measure.into((gradient, None)) + size * jax.random.normal(key, (2,))
            return _optim.ascend(optimizer, measure.back(blurred)[0], state, shared), None

        def end(key):
            keys = jax.random.split(key, rounds)
            return jax.lax.scan(step, (start, _optim.init(optimizer, start)), keys)[0][0].family

        return end

    exact = one(optax.adam(falling_to_zero(rounds)), 0.0)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), REPLICATES)
    found = jax.jit(jax.vmap(one(under_noise(rounds), noise)))(keys)
    errors = (found.loc - exact.loc) / jnp.exp(exact.log_scale)
    least = noise / np.sqrt(rounds)
    assert np.sqrt(np.mean(errors**2)) < 2 * least
    assert np.max(np.abs(errors)) < 6 * least
