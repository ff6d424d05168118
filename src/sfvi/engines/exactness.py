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
from ..model.apart import Apart

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
    return _agree(left, right)


def sums_up(silo: SiloData, apart: Apart, theta: Theta) -> bool:
    r"""Whether a silo's log density is that of its units one by one: $r + \sum_i \ell_i$, $r$ that of nobody."""
    size = int(silo.sizes.get(apart.plate, apart.num_units(silo)))
    try:
        with jax.enable_x64(True):
            whole = _densities([silo], theta)
            nobody = _densities([apart.nobody(silo)], theta) if silo.program.layout.own.size else {}
            units = _of_group(jax.vmap(lambda unit: apart.take(silo, unit))(jnp.arange(size)), theta)
    except (TypeError, ValueError):
        return False
    if not nobody.keys() <= units.keys():
        return False
    return _agree(whole, {site: values - (size - 1) * nobody.get(site, 0.0) for site, values in units.items()})


def _agree(left, right):
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
        for site, values in _of_group(stack(group), theta).items():
            total[site] = total.get(site, 0.0) + values
    return total


def _of_group(stacked, theta):
    """The same for silos of one shape, stacked."""
    found: dict = {}
    for seed in range(POINTS):
        terms = _evaluate(jax.tree.map(_double, stacked), _point(stacked, seed), _shift(theta, seed), jnp.asarray(seed))
        for site, values in terms.items():
            found.setdefault(site, []).append(np.asarray(values))
    return {site: np.concatenate(values) for site, values in found.items()}


@on_one_thread
def _evaluate(silos, z_locals, theta, seed):
    n_global = silos.program.population.layout.size
    z_global = 0.5 * jnp.sin(1.0 + seed + jnp.arange(n_global))

    def totals(z_global):
        def one(silo, z_local):
            indices = silo.draw(jax.random.key(seed))
            drawn = _drawn(z_local, indices)
            return silo.program.log_terms(z_global, drawn, theta, silo, indices)

        found = {site: jnp.sum(term) for site, term in eqx.filter_vmap(one)(silos, z_locals).items()}
        return found, found  # to differentiate, and as they are

    gradients, values = jax.jacrev(totals, has_aux=True)(z_global)
    return {site: jnp.append(gradients[site], value) for site, value in values.items()}


def stack(trees: Sequence) -> Any:
    """Stack trees of arrays on a new first axis, on the host: XLA would compile anew for every number of them."""
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack([np.asarray(leaf) for leaf in leaves])), *trees)


def _point(stacked, seed):
    """Latents of stacked silos."""
    layout = stacked.program.layout

    def values(ids, size):
        ids = np.asarray(ids, np.float64)
        angle = ids[:, :1] + 1.7 * ids[:, 1:] + 0.3 * np.arange(size)[:, None] + seed
        return jnp.asarray(0.5 * np.sin(angle))

    own = values(stacked.ids.silo, layout.own.size) if layout.own.size else None
    blocks = {group.plate.name: group.block for group in layout.groups}
    return Local(own, {plate: values(stacked.ids.units[plate], n) for plate, n in blocks.items()})


def _shift(theta, seed):
    """Away from the initial point, where a term may vanish by design."""
    return jax.tree.map(lambda leaf: _double(leaf) + 0.1 * (1 + seed), theta)


def _double(leaf):
    return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _drawn(z_local, indices):
    units = {p: z[:, indices[p]] if p in indices else z for p, z in z_local.units.items()}
    return Local(z_local.silo, units)
