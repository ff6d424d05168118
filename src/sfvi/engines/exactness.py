"""Does another arrangement of the same silos have the same log density?"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._types import Theta
from ..families import Local
from ..model import SiloData

TOLERANCE = 1e-7  # relative, in float64
POINTS = 2


def same_density(one: Sequence[SiloData], other: Sequence[SiloData], theta: Theta) -> bool:
    r"""Compare $\sum_j \log p_\theta(y_j, z_{Lj} \mid z_G)$ of two arrangements, and its gradient in $z_G$.

    Done in float64 at a few points where every unit's latents depend on who it is, not on where it stands.
    """
    try:
        with jax.enable_x64(True):
            left, right = (_density(list(silos), theta) for silos in (one, other))
    except (TypeError, ValueError):  # the program insists on its own precision or sizes: nothing can be said
        return False
    scale = 1.0 + np.max(np.abs(left))
    return bool(np.all(np.isfinite(left)) and np.max(np.abs(left - right)) <= TOLERANCE * scale)


def _density(silos, theta):
    n_global = silos[0].program.population.layout.size
    points = [[_point(silo, seed) for silo in silos] for seed in range(POINTS)]

    @eqx.filter_jit
    def evaluate(z_global, z_locals, silos, theta, key):
        def total(z_global):
            value = jnp.zeros(())
            for silo, z_local in zip(silos, z_locals, strict=True):
                indices = silo.draw(key)
                drawn = _drawn(z_local, indices)
                value += silo.program.log_prob(z_global, drawn, theta, silo, indices)
            return value

        value, gradient = jax.value_and_grad(total)(z_global)
        return jnp.append(gradient, value)

    wide, theta = jax.tree.map(_double, (silos, theta))
    values = []
    for seed, z_locals in enumerate(points):
        z_global = jnp.asarray(0.5 * np.sin(1.0 + seed + np.arange(n_global)))
        values.append(evaluate(z_global, z_locals, wide, theta, jax.random.key(seed)))
    return np.concatenate(values)


def _point(silo, seed):
    layout = silo.program.layout

    def values(ids, size):
        ids = np.asarray(ids, np.float64)
        angle = ids[0] + 1.7 * ids[1] + 0.3 * np.arange(size)[:, None] + seed
        return jnp.asarray(0.5 * np.sin(angle))

    own = values(silo.ids.silo, layout.own.size) if layout.own.size else None
    blocks = {group.plate.name: group.block for group in layout.groups}
    return Local(own, {plate: values(silo.ids.units[plate], n) for plate, n in blocks.items()})


def _double(leaf):
    return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _drawn(z_local, indices):
    units = {p: z[:, indices[p]] if p in indices else z for p, z in z_local.units.items()}
    return Local(z_local.silo, units)
