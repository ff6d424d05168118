"""Does another arrangement of the same silos have the same log density?"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._compile import on_one_thread
from .._types import Theta
from ..families import Local
from ..model import SiloData

TOLERANCE = 1e-9  # relative, in float64, of each site by itself
POINTS = 2


def same_density(one: Sequence[SiloData], other: Sequence[SiloData], theta: Theta) -> bool:
    r"""Compare $\sum_j \log p_\theta(y_j, z_{Lj} \mid z_G)$ of two arrangements by site, and its gradient in $z_G$.

    Done in float64 at a few points where every unit's latents depend on who it is, not on where it stands. Each site is
    measured against its own size, so that a small one counts beside a large one.
    """
    try:
        with jax.enable_x64(True):
            left, right = (_densities(silos, theta) for silos in (one, other))
    except (TypeError, ValueError):  # the program insists on its own precision or sizes: nothing can be said
        return False
    if left.keys() != right.keys():
        return False
    for site, values in left.items():
        scale = 1.0 + np.max(np.abs(values))
        if not np.all(np.isfinite(values)) or np.max(np.abs(values - right[site])) > TOLERANCE * scale:
            return False
    return True


def _densities(silos, theta):
    """Value and gradient of every site, summed over the silos; those of equal shape share one compiled function."""
    same_shape: dict = {}
    for silo in silos:
        same_shape.setdefault(silo.program, []).append(silo)
    total: dict = {}
    for group in same_shape.values():
        for seed in range(POINTS):
            locals_ = [_point(silo, seed) for silo in group]
            z_local, stacked = (stack(trees) for trees in (locals_, group))
            terms = _evaluate(jax.tree.map(_double, stacked), z_local, _shift(theta, seed), jnp.asarray(seed))
            for site, values in terms.items():
                found = total.setdefault(site, [0.0] * POINTS)
                found[seed] = found[seed] + np.asarray(values)
    return {site: np.concatenate(values) for site, values in total.items()}


@on_one_thread
def _evaluate(silos, z_locals, theta, seed):
    n_global = silos.program.population.layout.size
    z_global = 0.5 * jnp.sin(1.0 + seed + jnp.arange(n_global))

    def totals(z_global):
        def one(silo, z_local):
            indices = silo.draw(jax.random.key(seed))
            drawn = _drawn(z_local, indices)
            return silo.program.log_terms(z_global, drawn, theta, silo, indices)

        return {site: jnp.sum(term) for site, term in eqx.filter_vmap(one)(silos, z_locals).items()}

    values, gradients = totals(z_global), jax.jacrev(totals)(z_global)
    return {site: jnp.append(gradients[site], value) for site, value in values.items()}


def stack(trees: Sequence) -> Any:
    """Stack trees of arrays on a new first axis, on the host: XLA would compile anew for every number of them."""
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack([np.asarray(leaf) for leaf in leaves])), *trees)


def _point(silo, seed):
    layout = silo.program.layout

    def values(ids, size):
        ids = np.asarray(ids, np.float64)
        angle = ids[0] + 1.7 * ids[1] + 0.3 * np.arange(size)[:, None] + seed
        return jnp.asarray(0.5 * np.sin(angle))

    own = values(silo.ids.silo, layout.own.size) if layout.own.size else None
    blocks = {group.plate.name: group.block for group in layout.groups}
    return Local(own, {plate: values(silo.ids.units[plate], n) for plate, n in blocks.items()})


def _shift(theta, seed):
    """Away from the initial point, where a term may vanish by design."""
    return jax.tree.map(lambda leaf: _double(leaf) + 0.1 * (1 + seed), theta)


def _double(leaf):
    return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _drawn(z_local, indices):
    units = {p: z[:, indices[p]] if p in indices else z for p, z in z_local.units.items()}
    return Local(z_local.silo, units)
