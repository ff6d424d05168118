"""Finding the silo and the site where a run broke."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._types import Key
from ..algorithms import FederatedAlgorithm
from ..model import SiloData


class Culprit(NamedTuple):
    """Where the trouble is: the silo (None for the server), the site, and what is wrong there."""

    silo: str | None
    site: str
    symptom: str


def find_culprit(
    algorithm: FederatedAlgorithm,
    silo_key: Key,
    broadcast: Any,
    silos: Mapping[str, tuple[Any, SiloData]],
) -> Culprit:
    """Repeat the failing round silo by silo and site by site.

    Args:
        algorithm: The algorithm.
        silo_key: The run's key of the silos.
        broadcast: Of the round that fails.
        silos: Each silo's last good state, and its data.
    """
    worst = Culprit(None, "?", "the ELBO ran away")
    lowest = np.inf
    latents_fn = eqx.filter_jit(algorithm.latents)
    for position, (name, (state, data)) in enumerate(silos.items()):
        z_global, z_local, theta, indices = latents_fn(silo_key, state, broadcast, data)
        population = data.program.population

        def shared(point, population=population, theta=theta):
            return population.log_terms(point[0], theta)

        def own(point, data=data, theta=theta, indices=indices):
            def terms(draw):
                return data.program.log_terms(point[0], draw, theta, data, indices)

            size = len(jax.tree.leaves(point[1])[0]) if jax.tree.leaves(point[1]) else 1
            return jax.tree.map(lambda term: term / size, jax.vmap(terms, axis_size=size)(point[1]))

        parts = [(name, own)] if position else [(None, shared), (name, own)]
        for silo, terms_fn in parts:
            site, symptom, low = _worst_site(terms_fn, (z_global, z_local))
            if symptom is not None:
                return Culprit(silo, site, symptom)
            if low < lowest:
                lowest, worst = low, Culprit(silo, site, f"its log probability fell to {low:.3g}")
    return worst


def _worst_site(terms_fn, point):
    """The first site with a value or a gradient that is not finite, else the one with the lowest value."""
    terms_fn = jax.jit(terms_fn)  # not eagerly: NumPyro would refuse to evaluate what is wrong
    terms = terms_fn(point)
    totals = {site: float(jnp.sum(term)) for site, term in terms.items()}
    for site, value in totals.items():
        if not np.isfinite(value):
            return _readable(site), f"its log probability is {value}", value
    for site in terms:
        gradient = jax.grad(lambda p, site=site: jnp.sum(terms_fn(p)[site]))(point)
        if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradient)):
            return _readable(site), "the gradient of its log probability is not finite", -np.inf
    if not totals:
        return "?", None, np.inf
    site = min(totals, key=lambda name: totals[name])
    return _readable(site), None, totals[site]


def _readable(site):
    return site.removeprefix("_").removesuffix("_log_det") if site.endswith("_log_det") else site
