r"""A silo's marginal likelihood at draws of $z_G$, its own latents integrated out by importance sampling.

$$\hat p(y_j \mid z_G) = \frac1K \sum_k \frac{p(z_s^k \mid z_G)}{q(z_s^k \mid z_G)}
  \prod_i \frac1K \sum_l \frac{p_\theta(y_i, z_i^{kl} \mid z_G, z_s^k)}{q(z_i^{kl} \mid z_G, z_s^k)}$$

is unbiased, so $p(z_G) \prod_j \hat p(y_j \mid z_G) / q(z_G)$ is a weight of $z_G$ by itself. Units are weighed one by
one: a weight of all latents together would be that of one draw out of hundreds of dimensions, and useless. Draws of a
unit are a randomly shifted Sobol sequence, with far less noise than independent ones where units have few latents.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.stats import qmc

from .._compile import on_one_thread
from .._types import Key
from ..enhanced import weigh_units
from ..families import Local, StructuredLocal
from ..model import SiloData
from ..model.observed import log_joint_by_unit
from ..objectives import Shared

AT_A_TIME = 50_000  # weights of units computed together
TWICE = 32  # draws of z_G whose evidence is estimated a second time, to see the noise
NESTED = 8  # draws of each unit for each of the silo's own latents


class Evidence(NamedTuple):
    r"""What one silo says of draws of $z_G$: this is all of it that the server needs, and all that leaves.

    Attributes:
        log_marginals: $\log \hat p(y_j \mid z_G)$ at each draw.
        noise: Standard deviation of their error, from a repetition at some of them.
    """

    log_marginals: Float[np.ndarray, " samples"]
    noise: float


def evidence(
    key: Key,
    shared: Shared,
    local: StructuredLocal,
    data: SiloData,
    noise: Float[Array, "samples n_noise"],
    *,
    num_draws: int,
) -> Evidence:
    r"""Estimate $\log p_\theta(y_j \mid z_G)$ at the draws of $z_G$ that belong to the noise.

    Args:
        key: Of the draws of local latents.
        shared: $\eta_G$ and $\theta$.
        local: $q(z_L \mid z_G)$.
        data: The silo's.
        noise: $\epsilon_G$.
        num_draws: Of each unit, and of the latents of the silo as a whole.
    """
    separate = bool(data.program.separates(shared.theta, data))
    first, second = jax.random.split(key)
    both = [
        np.asarray(_log_marginals(k, shared, local, data, part, num_draws, separate), np.float64)
        for k, part in ((first, noise), (second, noise[:TWICE]))
    ]
    gaps = (both[0][:TWICE] - both[1])[np.isfinite(both[0][:TWICE]) & np.isfinite(both[1])]
    return Evidence(both[0], float(np.sqrt(np.mean(gaps**2) / 2)) if len(gaps) else float("inf"))


@on_one_thread
def _log_marginals(key, shared, local, data, noise, num_draws, separate):
    groups, own_size = data.program.layout.groups, data.program.layout.own.size
    of_units = min(num_draws, NESTED) if own_size and groups else num_draws
    center = shared.family.center

    def given_own(key, z_global, own):
        """All that is given the latents of the silo as a whole."""
        if not groups:
            return log_joint_by_unit(data, z_global, Local(own, {}), shared.theta)[0]
        drawn = {
            group.plate.name: shifted_normal(
                jax.random.fold_in(key, position), of_units, group.block, group.plate.size, center.dtype
            )
            for position, group in enumerate(groups)
        }
        _, (rest, log_weights) = weigh_units(data, shared, local, z_global, own, drawn)
        if separate:
            return rest[0] + sum(jnp.sum(_log_mean(weights)) for weights in log_weights.values())
        return _log_mean(rest + sum(jnp.sum(weights, axis=1) for weights in log_weights.values()))

    def one(inputs):
        noise, key = inputs
        z_global = shared.family.sample(noise)
        if local.silo is None:
            return given_own(key, z_global, None)
        own_key, key = jax.random.split(key)
        drawn = shifted_normal(own_key, num_draws, own_size, 1, center.dtype)

        def weigh(inputs):
            number, own_noise = inputs
            own = local.silo.sample(own_noise, z_global - center)
            log_q = jnp.sum(local.silo.log_prob(own, z_global - center))
            return given_own(jax.random.fold_in(key, number), z_global, own) - log_q

        return _log_mean(jax.lax.map(weigh, (jnp.arange(num_draws), drawn)))

    num_units = max(1, sum(group.plate.size for group in groups))
    together = max(1, AT_A_TIME // (of_units * num_units))
    return jax.lax.map(one, (noise, jax.random.split(key, noise.shape[0])), batch_size=together)


def shifted_normal(key: Key, num_draws: int, block: int, units: int, dtype) -> Float[Array, "draws block units"]:
    """Standard normals from a Sobol sequence, shifted at random for each unit: each point by itself is exact.

    With more latents than the sequence has dimensions they are independent.
    """
    if block > qmc.Sobol.MAXDIM:
        return jax.random.normal(key, (num_draws, block, units), dtype)
    sequence = jnp.asarray(qmc.Sobol(block, scramble=False).random(num_draws), dtype)
    uniform = (sequence[:, :, None] + jax.random.uniform(key, (block, units), dtype)) % 1.0
    tiny = jnp.finfo(dtype).eps / 2
    return jax.scipy.special.ndtri(jnp.clip(uniform, tiny, 1 - tiny))


def _log_mean(log_weights):
    return jax.nn.logsumexp(log_weights, axis=0) - jnp.log(log_weights.shape[0])
