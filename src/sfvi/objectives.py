r"""The terms of the ELBO, $\mathrm{E}_q[\mathcal{L}_0 + \sum_j \mathcal{L}_j]$, and their gradient estimators.

Both estimators are one reverse pass through these functions. "stl" (sticking the landing, Roeder et al. 2017)
stops the gradient at the parameters inside every $\log q$, $\mu_G$ in $C(z_G - \mu_G)$ included, but never at
$z_G$ or $z_L$ themselves; a learned centring (`model/centring.py`) is a parameter of $q$ there. "reparameterization"
stops nothing. Values are the same.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from ._types import GlobalVec, Indices, Scalar, Theta
from .errors import OptionError
from .families import AbstractGlobalFamily, Local, StructuredLocal
from .model import PopulationProgram, SiloData

Estimator = Literal["stl", "reparameterization"]
Tree = TypeVar("Tree")


class Shared(NamedTuple):
    r"""The parameters that all silos share.

    Attributes:
        family: $q(z_G; \eta_G)$.
        theta: $\theta$, in unconstrained space.
        network: $\phi$, weights of an inference network; None without one.
    """

    family: AbstractGlobalFamily
    theta: Theta
    network: PyTree


def server_term(
    population: PopulationProgram, shared: Shared, noise: Float[Array, " n_noise"], *, estimator: Estimator
) -> Scalar:
    r"""Evaluate $\mathcal{L}_0 = \log p_\theta(z_G) - \log q(z_G; \eta_G)$ at $z_G = f_G(\epsilon_G)$.

    Args:
        population: $p_\theta(z_G)$.
        shared: $\eta_G$ and $\theta$.
        noise: $\epsilon_G$.
        estimator: Which gradient this function has.
    """
    return factor_term(lambda z: population.log_prob(z, shared.theta), shared.family, noise, estimator=estimator)


def factor_term(
    log_factor: Callable[[GlobalVec], Scalar],
    family: AbstractGlobalFamily,
    noise: Float[Array, " n_noise"],
    *,
    estimator: Estimator,
) -> Scalar:
    r"""Evaluate $\log t(z_G) - \log q(z_G; \eta_G)$ at $z_G = f_G(\epsilon_G)$.

    Args:
        log_factor: $\log t$: the prior, or what stands for other silos.
        family: $q(z_G; \eta_G)$.
        noise: $\epsilon_G$.
        estimator: Which gradient this function has.
    """
    frozen = freezer(estimator)
    z_global = family.sample(noise)
    return log_factor(z_global) - frozen(family).log_prob(z_global)


def silo_term(
    data: SiloData,
    shared: Shared,
    local: StructuredLocal,
    noise: Float[Array, " n_noise"],
    local_noise: Local,
    indices: Indices,
    *,
    estimator: Estimator,
) -> Scalar:
    r"""Evaluate $\mathcal{L}_j = \log p_\theta(y_j, z_L \mid z_G) - \log q(z_L \mid z_G; \eta_L, \eta_G)$.

    Args:
        data: $y_j$ and the silo's program.
        shared: $\eta_G$ and $\theta$.
        local: $q(z_L \mid z_G)$ of the drawn units.
        noise: $\epsilon_G$.
        local_noise: $\epsilon_L$, the silo's own.
        indices: The drawn units of each subsampled plate.
        estimator: Which gradient this function has.
    """
    frozen = freezer(estimator)
    center = shared.family.center
    z_global = shared.family.sample(noise)
    z_local, theta = local.sample(local_noise, z_global, center), shared.theta
    if estimator == "stl":
        z_local, theta = data.program.hand_over_centring(z_global, z_local, theta, data, indices)
    log_q = frozen(local).log_prob(z_local, z_global, frozen(center))
    log_p = data.program.log_prob(z_global, z_local, theta, data, indices)
    return log_p - data.sum_units(log_q)


def freezer(estimator: str) -> Callable[[Tree], Tree]:
    r"""What the estimator does to the parameters inside $\log q$."""
    if estimator == "stl":
        return stop_gradient
    if estimator == "reparameterization":
        return lambda tree: tree
    raise OptionError(f"estimator is {estimator!r}; choose 'stl' or 'reparameterization'.")


def stop_gradient(tree):
    """Arrays only: an inference network holds functions too."""
    return jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf) if eqx.is_array(leaf) else leaf, tree)
