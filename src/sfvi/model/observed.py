"""What a silo observes: its log likelihood, data replicated from the model, and the log joint unit by unit."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool
from numpyro.distributions.distribution import MaskedDistribution

from .._types import GlobalVec, Key, Scalar, Theta
from ..families import Local
from .programs import SiloData
from .tracing import site_dims, unit_log_probs


class Observation(NamedTuple):
    """An observed site.

    Attributes:
        value: What was observed.
        counts: Which elements count; the others are masked.
        dims: Names of the dimensions, where plates give some.
        likelihood_dims: Those of its log likelihood, which has one number for each draw of the distribution.
    """

    value: np.ndarray
    counts: Bool[np.ndarray, "..."]
    dims: list[str | None]
    likelihood_dims: list[str | None]


def observations(data: SiloData, theta: Theta) -> dict[str, Observation]:
    """The observed sites of a silo."""
    recorded = _run(data, *_origin(data), theta)
    found = {}
    for name, site in recorded.items():
        if not is_observed(site):
            continue
        value = np.broadcast_to(np.asarray(site["value"]), _shape(site))
        dims = site_dims({**site, "value": value})
        counts = np.broadcast_to(np.asarray(_counts(site["fn"])), np.shape(value))
        events = len(site["fn"].event_shape)
        found[name] = Observation(value, counts, dims, dims[: len(dims) - events])
    return found


def log_likelihood(
    data: SiloData,
    z_global: GlobalVec,
    z_local: Local,
    theta: Theta,
    values: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    r"""$\log p_\theta(y \mid z)$ of each observed site, an element for each draw of its distribution.

    Args:
        data: The silo's.
        z_global: $z_G$.
        z_local: $z_L$.
        theta: $\theta$.
        values: Other values of the sites than those observed.
    """
    recorded = _run(data, z_global, z_local, theta)
    sites = {name: site for name, site in recorded.items() if is_observed(site)}
    return {
        name: site["fn"].log_prob(site["value"] if values is None else values[name]) for name, site in sites.items()
    }


def replicate(key: Key, data: SiloData, z_global: GlobalVec, z_local: Local, theta: Theta) -> dict[str, Array]:
    r"""Draw $y \mid z$ anew for each observed site, given the data that it is not about."""
    recorded = _run(data, z_global, z_local, theta)
    sites = {name: site for name, site in recorded.items() if is_observed(site)}
    return {
        name: _expanded(site).sample(jax.random.fold_in(key, position))
        for position, (name, site) in enumerate(sites.items())
    }


def log_joint_by_unit(
    data: SiloData, z_global: GlobalVec, z_local: Local, theta: Theta
) -> tuple[Scalar, dict[str, Array]]:
    r"""Evaluate $\log p_\theta(y_i, z_i \mid z_G, z_s)$ of all units, and that of all else; no minibatches."""
    recorded = _run(data, z_global, z_local, theta)
    unscaled = {group.plate.name: 1.0 for group in data.program.layout.groups}  # NumPyro sees that all are there
    rest, units = unit_log_probs(recorded, {}, unscaled, data.owners)
    return rest.astype(z_global.dtype), units


def is_observed(site: dict[str, Any]) -> bool:
    """Whether a site of a trace holds data: no latent, no `numpyro.factor`."""
    return site["type"] == "sample" and site["is_observed"] and not site["infer"].get("is_auxiliary", False)


def _run(data, z_global, z_local, theta):
    return data.program.run(z_global, z_local, theta, data, data.everyone())


def _origin(data):
    layout = data.program.layout
    own = jnp.zeros((layout.own.size, 1)) if layout.own.size else None
    units = {group.plate.name: jnp.zeros((group.block, group.plate.size)) for group in layout.groups}
    return jnp.zeros(data.program.population.layout.size), Local(own, units)


def _shape(site):
    """Of the data and of the distribution together: NumPyro lets either be the smaller one."""
    return np.broadcast_shapes(jnp.shape(site["value"]), site["fn"].shape())


def _expanded(site):
    """The distribution with a draw of its own for every value: `obs=` may have more than it says."""
    fn, shape = site["fn"], _shape(site)
    batch = shape[: len(shape) - len(fn.event_shape)]
    return fn if batch == fn.batch_shape else fn.expand(batch)


def _counts(fn):
    """The mask of a distribution, elementwise over its values; True if it has none."""
    mask = True
    while True:
        if isinstance(fn, MaskedDistribution):
            inner, events = jnp.asarray(fn._mask), len(fn.event_shape)
            mask = mask & inner.reshape(inner.shape + (1,) * events) if inner.ndim else mask & inner
        fn = getattr(fn, "base_dist", None)
        if fn is None:
            return mask
