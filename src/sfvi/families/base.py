"""What a variational family is.

A family is a pytree whose array leaves are all trainable; sizes follow from their shapes. It sees flat
unconstrained vectors only: the model maps them to named sites.
"""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import GlobalVec, Scalar

LOG_2PI = 1.8378770664093453


class AbstractGlobalFamily(eqx.Module):
    r"""A distribution $q(z_G; \eta_G)$ with a reparameterization $z_G = f_G(\epsilon)$."""

    @property
    @abc.abstractmethod
    def noise_size(self) -> int:
        r"""Length of $\epsilon$, standard normal."""

    @property
    @abc.abstractmethod
    def center(self) -> GlobalVec:
        r"""The point $\mu_G$ from which the local families measure $z_G$."""

    @abc.abstractmethod
    def sample(self, noise: Float[Array, " n_noise"]) -> GlobalVec:
        r"""Evaluate $f_G(\epsilon)$."""

    @abc.abstractmethod
    def log_prob(self, z_global: GlobalVec) -> Scalar:
        r"""Evaluate $\log q(z_G)$."""

    @abc.abstractmethod
    def marginals(self) -> tuple[GlobalVec, GlobalVec]:
        """Mean and standard deviation of each coordinate."""


def standard_normal_log_prob(noise: Float[Array, "n *batch"]) -> Float[Array, "*batch"]:
    """Log density of independent standard normals, summed over the first axis."""
    return -0.5 * (jnp.sum(noise**2, axis=0) + noise.shape[0] * LOG_2PI)
