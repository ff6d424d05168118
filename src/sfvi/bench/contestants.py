r"""Ways to ascend the same ELBO on the same data: a hand-written loop, `numpyro.infer.SVI`, and SFVI.

All use the structured Gaussian family for the six-cities model: $z_G = (\beta, \omega)$ with full covariance and
$b_i = \mu_i + C_i (z_G - \mu_G) + \sigma_i \epsilon_i$.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.scipy.stats import norm
from numpyro.infer import SVI, Trace_ELBO
from numpyro.optim import optax_to_numpyro

from ..algorithms import SFVI
from ..data import split_units
from ..engines import batching, loop
from ..families import block
from ..model import StructuredModel
from ..zoo import logistic_mixed_model
from ..zoo.logistic_mixed import population, silo

SCALE = 0.1  # initial standard deviation of every latent
SPLIT_SEED = 1

Data = Mapping[str, np.ndarray]


class Contestant(NamedTuple):
    """A compiled loop.

    Attributes:
        state: Where it stands; starts at the same variational parameters for everyone.
        run: Does the steps of one repetition from a state; returns the next state and the ELBO of each step.
    """

    state: Any
    run: Callable[[Any], tuple[Any, Any]]


def hand_written(data: Data, *, steps: int, optimizer: optax.GradientTransformation) -> Contestant:
    """The loop a user of JAX writes for pooled data: draw, differentiate, step, all in one jitted scan."""
    data = jax.tree.map(jnp.asarray, dict(data))
    params = initial_params(len(data["x"]))

    @jax.jit
    def scan(state, data):
        def step(state, _):
            params, opt_state, index = state
            noise = draw_noise(index, len(data["x"]))
            (params, opt_state), value = ascend(optimizer, params, opt_state, noise, data)
            return (params, opt_state, index + 1), value

        return lax.scan(step, state, length=steps)

    return Contestant((params, optimizer.init(params), jnp.asarray(0)), lambda state: scan(state, data))


def hand_tuned(data: Data, *, steps: int, optimizer: optax.GradientTransformation) -> Contestant:
    """The same, with the noise drawn one step ahead and carried.

    What a loop carries is in memory; otherwise XLA's CPU compiler computes the inverse error function behind the noise
    again in every fusion that uses it.
    """
    data = jax.tree.map(jnp.asarray, dict(data))
    units = len(data["x"])
    params = initial_params(units)

    @jax.jit
    def scan(state, data):
        def step(state, _):
            params, opt_state, index, noise = state
            (params, opt_state), value = ascend(optimizer, params, opt_state, noise, data)
            return (params, opt_state, index + 1, draw_noise(index + 1, units)), value

        return lax.scan(step, state, length=steps)

    state = (params, optimizer.init(params), jnp.asarray(0), draw_noise(0, units))
    return Contestant(state, lambda state: scan(state, data))


def initial_params(units: int) -> dict[str, jax.Array]:
    """The same beginning for everyone."""
    return {
        "loc": jnp.zeros(5),
        "log_scale": jnp.full(5, np.log(SCALE), jnp.float32),
        "lower": jnp.zeros((5, 5)),
        "unit_loc": jnp.zeros(units),
        "unit_log_scale": jnp.full(units, np.log(SCALE), jnp.float32),
        "coupling": jnp.zeros((5, units)),
    }


def draw_noise(index, units):
    """Of a step: for the global latents, and for the units."""
    global_key, unit_key = jax.random.split(jax.random.fold_in(jax.random.key(0), index))
    return jax.random.normal(global_key, (5,)), jax.random.normal(unit_key, (units,))


def ascend(optimizer, params, opt_state, noise, data):
    """One step up the ELBO."""
    loss, gradient = jax.value_and_grad(lambda params: -elbo(params, noise, data))(params)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), -loss


def elbo(params, noise, data):
    """The ELBO estimate, with the gradient that sticks the landing."""
    z = params["loc"] + jnp.exp(params["log_scale"]) * (triangle(params["lower"]) @ noise[0])
    b = unit_mean(params, z) + jnp.exp(params["unit_log_scale"]) * noise[1]

    fixed = lax.stop_gradient(params)
    scaled = (z - fixed["loc"]) * jnp.exp(-fixed["log_scale"])
    whitened = solve_triangular(triangle(fixed["lower"]), scaled, lower=True, unit_diagonal=True)
    log_q = norm.logpdf(whitened).sum() - fixed["log_scale"].sum()
    log_q += norm.logpdf(b, unit_mean(fixed, z), jnp.exp(fixed["unit_log_scale"])).sum()

    logits = data["x"] @ z[:4] + b[:, None]
    log_p = norm.logpdf(z, 0.0, 10.0).sum() + norm.logpdf(b, 0.0, jnp.exp(-z[4])).sum()
    log_p += (data["y"] * logits - jax.nn.softplus(logits)).sum()  # log_sigmoid of either sign is slower
    return log_p - log_q


def triangle(lower):
    """A lower triangle with ones on its diagonal."""
    return jnp.tril(lower, -1) + jnp.eye(5)


def unit_mean(params, z):
    """Means of the units' effects, given the global latents."""
    return params["unit_loc"] + (z - params["loc"]) @ params["coupling"]


def numpyro_svi(data: Data, *, steps: int, optimizer: optax.GradientTransformation) -> Contestant:
    """`numpyro.infer.SVI` on pooled data.

    A jitted scan over `svi.update`: `svi.run` compiles its loop anew at every call.
    """
    data = jax.tree.map(jnp.asarray, dict(data))
    svi = SVI(_pooled_model, _guide, optax_to_numpyro(optimizer), Trace_ELBO())

    @jax.jit
    def scan(state, data):
        state, losses = lax.scan(lambda state, _: svi.update(state, data), state, length=steps)
        return state, -losses

    return Contestant(svi.init(jax.random.key(0), data), lambda state: scan(state, data))


def _pooled_model(data):
    silo(population(), data)


def _guide(data):
    units = len(data["x"])
    params: dict[str, Any] = {name: numpyro.param(name, value) for name, value in initial_params(units).items()}
    scale_tril = jnp.exp(params["log_scale"])[:, None] * triangle(params["lower"])
    joint = dist.MultivariateNormal(params["loc"], scale_tril=scale_tril)
    z: Any = numpyro.sample("z", joint, infer={"is_auxiliary": True})
    numpyro.sample("beta", dist.Delta(z[:4], event_dim=1))
    numpyro.sample("omega", dist.Delta(z[4]))
    with numpyro.plate("children", units):
        numpyro.sample("b", dist.Normal(unit_mean(params, z), jnp.exp(params["unit_log_scale"])))


def federated(
    data: Data, sizes: Sequence[int], *, steps: int, optimizer: optax.GradientTransformation, merge: bool
) -> Contestant:
    """SFVI over silos of the given sizes, on the compiled loop that `sfvi.fit` uses.

    Args:
        data: Pooled data.
        sizes: Units per silo.
        steps: Steps per repetition.
        optimizer: Of all parameters.
        merge: Lay the silos end to end, which `sfvi.fit` does with this algorithm; otherwise they are stacked.
    """
    silos, _ = split_units(dict(data), sizes, seed=SPLIT_SEED)
    algorithm = SFVI(optimizer=optimizer, init_scale=SCALE, local_family=block(coupling="mean"))
    rounds, state = prepare(logistic_mixed_model(), silos, algorithm, merge=merge)
    return Contestant(state, lambda state: advance(rounds, state, steps))


def advance(rounds: loop.Loop, state: loop.State, steps: int) -> tuple[loop.State, np.ndarray]:
    """Do so many steps, in calls of at most `loop.MAX_CHUNK`, as in a fit."""
    parts, left = [], steps
    while left:
        chunk = rounds.run(jax.random.key(0), state, jnp.asarray(min(left, loop.MAX_CHUNK)))
        size = int(chunk.rounds)
        parts.append(np.asarray(chunk.trace["elbo"][:size]))
        state, left = chunk.state, left - size
    return state, np.concatenate(parts)


def prepare(
    model: StructuredModel, silos: Mapping[str, Data], algorithm: SFVI, *, merge: bool
) -> tuple[loop.Loop, loop.State]:
    """Do what `sfvi.fit` does before its first round."""
    key = jax.random.key(0)
    data = {name: model.silo_data(name, silos[name]) for name in sorted(silos)}
    theta = model.initial_theta(key, data)
    bound = algorithm.bind(model)
    batches = batching.plan(model, data, theta, merge=merge and bound.additive)
    rounds = loop.build(bound, batches, {name: silo.num_units for name, silo in data.items()})
    return rounds, rounds.init(key, theta)
