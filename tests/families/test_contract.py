"""One contract for every Gaussian family: `sample` and `log_prob` describe the same Gaussian, the one on paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

import sfvi
from sfvi import families
from sfvi.families import Local, StructuredLocal
from sfvi.families.triangular import multiply, packed_size, solve, unpack

from ..helpers import GAUSSIAN_FAMILIES, GLOBAL_FAMILIES, LOCAL_FAMILIES, perturb

SIZES = [1, 2, 5, 12]


def make_global(name, size):
    return perturb(GLOBAL_FAMILIES[name](jnp.zeros(size), 0.5), seed=size)


def make_local(name, units, block, parent):
    return perturb(LOCAL_FAMILIES[name](units, block, parent, 0.5, jnp.float64), seed=units)


def affine(function, size):
    """Offset and matrix of an affine function of a vector."""
    offset = function(jnp.zeros(size))
    return np.asarray(offset), np.asarray(jax.jacobian(function)(jnp.zeros(size)))


def test_registry_is_what_is_exported():
    choosers = {name for name in families.__all__ if name.islower()}
    assert choosers == {*GLOBAL_FAMILIES, "block", "amortized"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GAUSSIAN_FAMILIES)
def test_global_density_is_that_of_the_sampled_gaussian(name, size):
    family = make_global(name, size)
    mean, factor = affine(family.sample, family.noise_size)
    z = np.random.default_rng(1).normal(size=size)
    expected = scipy.stats.multivariate_normal(mean, factor @ factor.T).logpdf(z)
    np.testing.assert_allclose(family.log_prob(jnp.asarray(z)), expected, rtol=1e-10)


@pytest.mark.parametrize("name", GAUSSIAN_FAMILIES)
def test_global_marginals(name):
    family = make_global(name, 5)
    mean, factor = affine(family.sample, family.noise_size)
    np.testing.assert_allclose(family.marginals()[0], mean, rtol=1e-12)
    np.testing.assert_allclose(family.marginals()[1], np.sqrt(np.diag(factor @ factor.T)), rtol=1e-12)


@pytest.mark.parametrize("block", [1, 3, 12])
@pytest.mark.parametrize("name", LOCAL_FAMILIES)
def test_local_density_is_that_of_the_sampled_gaussian(name, block):
    units, parent = 4, 3
    family = make_local(name, units, block, parent)
    deviation = jnp.asarray(np.random.default_rng(2).normal(size=parent))
    flat, factor = affine(lambda e: family.sample(e.reshape(block, units), deviation).ravel(), block * units)
    z = np.random.default_rng(3).normal(size=block * units)
    expected = scipy.stats.multivariate_normal(flat, factor @ factor.T).logpdf(z)
    densities = family.log_prob(jnp.asarray(z).reshape(block, units), deviation)
    assert densities.shape == (units,)
    np.testing.assert_allclose(densities.sum(), expected, rtol=1e-10)


@pytest.mark.parametrize("name", LOCAL_FAMILIES)
def test_units_are_independent_given_the_parent(name):
    family = make_local(name, 3, 2, 2)
    jacobian = jax.jacobian(lambda e: family.sample(e, jnp.ones(2)))(jnp.zeros((2, 3)))
    for i in range(3):
        for j in range(3):
            assert i == j or not np.any(jacobian[:, i, :, j])


def test_joint_covariance_is_sigma_c_transposed():
    """Cov(z_G, z_L) = Sigma_GG C^T; the paper's transpose is missing."""
    shared = make_global("full", 3)
    local = make_local("full-mean", 2, 2, 3)

    def joint(noise):
        z_global = shared.sample(noise[:3])
        z_local = local.sample(noise[3:].reshape(2, 2), z_global - shared.center)
        return jnp.concatenate([z_global, z_local.ravel()])

    _, factor = affine(joint, 7)
    covariance = factor @ factor.T
    coupling = np.asarray(local.coupling).reshape(3, 4).T
    np.testing.assert_allclose(covariance[:3, 3:], covariance[:3, :3] @ coupling.T, rtol=1e-10)


@pytest.mark.parametrize("name", LOCAL_FAMILIES)
def test_silo_latents_and_units_form_one_density(name):
    """q(z_s | z_G) q(z_i | z_G, z_s): the composite's density is the dense Gaussian's."""
    own = make_local(name, 1, 2, 3)
    units = make_local(name, 4, 2, 5)
    family = StructuredLocal(own, {"units": units})
    z_global, center = jnp.asarray([0.3, -0.2, 0.5]), jnp.asarray([0.1, 0.2, -0.1])

    def flat(noise):
        parts = Local(noise[:2].reshape(2, 1), {"units": noise[2:].reshape(2, 4)})
        values = family.sample(parts, z_global, center)
        return jnp.concatenate([values.silo.ravel(), values.units["units"].ravel()])

    noise = jnp.asarray(np.random.default_rng(4).normal(size=10))
    z = flat(noise)
    # change of variables from standard noise: exact also where the scale follows the parent
    _, log_det = np.linalg.slogdet(jax.jacobian(flat)(noise))
    expected = scipy.stats.norm.logpdf(noise).sum() - log_det
    densities = family.log_prob(Local(z[:2].reshape(2, 1), {"units": z[2:].reshape(2, 4)}), z_global, center)
    np.testing.assert_allclose(densities.silo.sum() + densities.units["units"].sum(), expected, rtol=1e-9)


@given(st.integers(1, 11), st.integers(0, 2**31))
def test_triangular_solve_undoes_multiplication(size, seed):
    generator = np.random.default_rng(seed)
    matrix = unpack(jnp.asarray(generator.normal(size=(packed_size(size), 3))), size)
    assert np.allclose(np.triu(np.moveaxis(matrix, -1, 0)), np.eye(size))
    vector = jnp.asarray(generator.normal(size=(size, 3)))
    np.testing.assert_allclose(solve(matrix, multiply(matrix, vector)), vector, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", GLOBAL_FAMILIES)
def test_families_work_in_single_precision(name, float32):
    family = GLOBAL_FAMILIES[name](jnp.zeros(4), 0.5)
    with jax.numpy_dtype_promotion("strict"):
        z = family.sample(jnp.ones(family.noise_size))
        assert family.log_prob(z).dtype == z.dtype == jnp.float32


def test_options_are_checked():
    with pytest.raises(sfvi.OptionError, match="'auto', 'diagonal' or 'full'"):
        families.block(within="dense")
    with pytest.raises(sfvi.OptionError, match="coupling is 'scale'"):
        families.block(coupling="scale")
    with pytest.raises(sfvi.OptionError, match="rank is 0"):
        families.low_rank(rank=0)
    with pytest.raises(sfvi.OptionError, match="coupling='none'"):
        families.block()(20_000, 21, 42_000, 0.1, jnp.float32)
