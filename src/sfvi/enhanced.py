r"""The locally enhanced bound: K importance samples of each unit's latents, only inside the silo.

$$\sum_i \log \frac1K \sum_{k=1}^K w_{ik}, \qquad
  w_{ik} = \frac{p_\theta(y_i, z_{ik} \mid z_G)}{q(z_{ik}; \phi_i)}, \qquad z_{ik} = T(\epsilon_{ik}; \phi_i)$$

takes the place of $\mathcal{L}_j$ (Geffner & Domke 2022). It is still a sum over silos, so messages stay as they are,
and it takes away most of the bias that Gaussian locals put on $z_G$.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._types import GlobalVec, Indices, Key, Scalar
from .families import Local, StructuredLocal
from .model import SiloData
from .model.observed import log_joint_by_unit
from .objectives import Estimator, Shared, freezer, stop_gradient


def enhanced_silo_term(
    data: SiloData,
    shared: Shared,
    local: StructuredLocal,
    noise: Float[Array, " n_noise"],
    local_noise: Local,
    indices: Indices,
    *,
    estimator: Estimator,
    chunk: int | None,
) -> Scalar:
    r"""Evaluate the locally enhanced $\mathcal{L}_j$.

    $\phi_i$ is all that $q(z_i \mid z_G)$ is made of, mean and scale after $C$ and $D$ have acted. "stl" is here the
    doubly reparameterized gradient (Tucker et al. 2018): with $v_k = w_k / \sum_l w_l$, the gradient in $\phi_i$ is
    $\sum_k v_k^2 (\partial_z \log w_k)^\top \partial_\phi T$ with $\phi_i$ stopped inside $\log q$, chained on to
    $\eta_L$, $\eta_G$, $\phi$ and $z_G$; where $z_G$ and $\theta$ enter $\log p$ directly it is
    $\sum_k v_k \partial \log p$. Latents of the silo as a whole are drawn once and count as in the ELBO.

    Args:
        data: $y_j$ and the silo's program.
        shared: $\eta_G$ and $\theta$.
        local: $q(z_L \mid z_G)$ of the drawn units.
        noise: $\epsilon_G$.
        local_noise: $\epsilon_L$ with the K draws on the first axis of the units' arrays.
        indices: The drawn units of each subsampled plate.
        estimator: Which gradient this function has.
        chunk: Draws evaluated at a time; None for all.
    """
    frozen = freezer(estimator)
    center = shared.family.center
    z_global = shared.family.sample(noise)
    own, log_q_own, theta = None, jnp.zeros(()), shared.theta
    if local.silo is not None and local_noise.silo is not None:
        own = local.silo.sample(local_noise.silo, z_global - center)
    blocks = local.conditional(own, z_global, center)
    draws = _draw(blocks, local_noise.units)
    if estimator == "stl" and data.program.learned:
        own, draws, theta = _hand_over_centring(data, z_global, own, draws, theta, indices)
    if own is not None and local.silo is not None:
        log_q_own = jnp.sum(frozen(local.silo).log_prob(own, z_global - frozen(center)))
    still = frozen(blocks)

    def all_weights(draws, z_global, own, theta):
        def one(z_units):
            return _log_weights(data, still, z_units, z_global, own, theta, indices)

        if chunk is None:
            return jax.vmap(one)(draws)
        return jax.lax.map(jax.checkpoint(one), draws, batch_size=chunk)

    others = (z_global, own, theta)
    if estimator == "stl":
        stopped = stop_gradient((draws, *others))
        _, values = all_weights(*stopped)
        shares = jax.tree.map(lambda v: jax.lax.stop_gradient(jax.nn.softmax(v, axis=0)), values)
        weighed = {plate: _weigh(z, shares[plate][:, None, :]) for plate, z in draws.items()}
        rest, live = all_weights(weighed, *others)
        bounds = {}
        for plate, share in shares.items():
            bound = _log_mean(jax.lax.stop_gradient(values[plate]))
            surrogate = jnp.sum(share * live[plate], axis=0)
            bounds[plate] = jax.lax.stop_gradient(bound - surrogate) + surrogate
    else:
        rest, live = all_weights(draws, *others)
        bounds = {plate: _log_mean(values) for plate, values in live.items()}
    return jnp.mean(rest) - log_q_own + data.sum_units(Local(None, bounds))


def resample(
    key: Key,
    data: SiloData,
    shared: Shared,
    local: StructuredLocal,
    noise: Float[Array, " n_noise"],
    local_noise: Local,
) -> tuple[GlobalVec, Local]:
    r"""Draw $(z_G, z_L)$ from what the enhanced bound is the ELBO of: one of each unit's K draws, with weight $w_{ik}$.

    $q(z_i \mid z_G)$ itself is only a proposal here, and wider than the posterior.

    Args:
        key: To choose with.
        data: $y_j$ and the silo's program.
        shared: $\eta_G$ and $\theta$.
        local: $q(z_L \mid z_G)$ of all units.
        noise: $\epsilon_G$.
        local_noise: $\epsilon_L$ with the K draws on the first axis of the units' arrays.
    """
    center, z_global = shared.family.center, shared.family.sample(noise)
    own = None
    if local.silo is not None and local_noise.silo is not None:
        own = local.silo.sample(local_noise.silo, z_global - center)
    draws, (_, log_weights) = weigh_units(data, shared, local, z_global, own, local_noise.units)
    units = {}
    for position, (plate, z) in enumerate(draws.items()):
        chosen = jax.random.categorical(jax.random.fold_in(key, position), log_weights[plate], axis=0)
        units[plate] = jnp.take_along_axis(z, chosen[None, None, :], axis=0)[0]
    return z_global, Local(own, units)


def weigh_units(
    data: SiloData,
    shared: Shared,
    local: StructuredLocal,
    z_global: GlobalVec,
    own: Float[Array, "n_own 1"] | None,
    noise: dict[str, Float[Array, "draws block units"]],
) -> tuple[dict[str, Array], tuple[Float[Array, " draws"], dict[str, Float[Array, "draws units"]]]]:
    r"""Draw K times the latents of all units at given $(z_G, z_s)$, and weigh each draw.

    Args:
        data: $y_j$ and the silo's program.
        shared: $\eta_G$ and $\theta$.
        local: $q(z_L \mid z_G)$ of all units.
        z_global: $z_G$.
        own: $z_s$, the silo's latents outside any plate; None if there are none.
        noise: $\epsilon_L$ of the units, by plate.

    Returns:
        The draws; for each the log density of all that is outside the units' plates, and $\log w_{ik}$.
    """
    blocks, nowhere = local.conditional(own, z_global, shared.family.center), jnp.zeros(0)
    draws = _draw(blocks, noise)

    def one(z_units):
        rest, log_p = log_joint_by_unit(data, z_global, Local(own, z_units), shared.theta)
        return rest, {plate: log_p[plate] - blocks[plate].log_prob(z, nowhere) for plate, z in z_units.items()}

    return draws, jax.lax.map(one, draws)


def _draw(blocks, noise):
    """K draws of every unit."""
    nowhere = jnp.zeros(0)
    return {plate: jax.vmap(lambda e, b=block: b.sample(e, nowhere))(noise[plate]) for plate, block in blocks.items()}


def _hand_over_centring(data, z_global, own, draws, theta, indices):
    """For all draws; what they have in common is the same in each."""

    def one(units):
        return data.program.hand_over_centring(z_global, Local(own, units), theta, data, indices)

    first, stopped = one(jax.tree.map(lambda z: z[0], draws))
    return first.silo, jax.vmap(lambda units: one(units)[0].units)(draws), stopped


def _log_weights(data, blocks, z_units, z_global, own, theta, indices):
    """The log density of all that is outside the units' plates, and the log weight of each unit's draw."""
    nowhere = jnp.zeros(0)
    rest, log_p = data.program.unit_log_probs(z_global, Local(own, z_units), theta, data, indices)
    return rest, {plate: log_p[plate] - blocks[plate].log_prob(z, nowhere) for plate, z in z_units.items()}


def _log_mean(log_weights):
    return jax.nn.logsumexp(log_weights, axis=0) - jnp.log(log_weights.shape[0])


@jax.custom_vjp
def _weigh(values, weights):
    """The values, with their gradient multiplied by the weights. No arithmetic, so XLA sees that nothing changed."""
    del weights
    return values


_weigh.defvjp(lambda values, weights: (values, weights), lambda weights, ct: (ct * weights, jnp.zeros_like(weights)))
