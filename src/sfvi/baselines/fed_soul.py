"""FedSOUL for FedPop (Kotelevskii et al. 2022): a shared network found as a point, and draws of personal heads."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.stats import norm

from .. import _optim
from .._random import as_key
from .._types import Key
from ..errors import OptionError
from .networks import features, init_layers, linear, log_likelihood, num_weights
from .stacking import Stacked, position_of, stack_labelled


@dataclasses.dataclass(frozen=True)
class FedSoul:
    r"""The method as its authors define it, but for the server's steps, which are those of Adam.

    Head $z_i$ of silo i has the prior $\mathcal{N}(\mu, \sigma^2)$, elementwise; the shared layers $\phi$ have the
    prior $\mathcal{N}(0, 1)$. In a round, every silo makes Langevin steps from where it was,

    $$z \leftarrow z + \gamma\, \nabla_z [\log p(D_i \mid \phi, z) + \log p(z \mid \mu, \sigma)]
      + \sqrt{2\gamma}\, \xi,$$

    and returns means over the later ones of $\nabla_\phi \log p(D_i \mid \phi, z)$ and
    $\nabla_{\mu, \log\sigma} \log p(z \mid \mu, \sigma)$; the server moves $\phi$, $\mu$ and $\sigma$ by their sums
    over silos and the gradient of the prior.

    Attributes:
        hidden: Widths of the shared layers.
        num_rounds: Exchanges.
        num_local_steps: Of Langevin in a round.
        left_out: The share of them, the first, whose gradients are not used.
        gamma: Step size $\gamma$ of the draws; this and `step_size` are those that held-out images of MNIST choose.
        batch_size: Rows in a step, drawn anew, scaled up to all.
        step_size: Of the server's Adam.
        initial_scale: $\sigma$ at the start.
    """

    hidden: tuple[int, ...] = (64,)
    num_rounds: int = 20
    num_local_steps: int = 100
    left_out: float = 0.5
    gamma: float = 1e-3
    batch_size: int = 100
    step_size: float = 0.01
    initial_scale: float = 0.5

    def __post_init__(self):
        if not 0 <= self.left_out < 1:
            raise OptionError(f"FedSoul: left_out is {self.left_out}; give a share of the steps, from 0 to below 1.")

    @property
    def num_left_out(self) -> int:
        """How many steps that is."""
        return int(self.left_out * self.num_local_steps)

    def num_sent(self, num_inputs: int, num_classes: int) -> int:
        r"""How many numbers go to a silo in an exchange, and as many back: of $\phi$, $\mu$ and $\sigma$."""
        return num_weights([num_inputs, *self.hidden], biases=False) + 2 * self.hidden[-1] * num_classes


@dataclasses.dataclass(frozen=True)
class ReportedFedSoul:
    """What the paper's comparison evidently ran: the public configuration for MNIST.

    No draws are made: heads are optimized. A few silos are drawn in each round and visited one after another, so with
    50 silos, 10 a round and 20 rounds a silo is never visited with probability 0.8^20 = 1.2%, and predicts by chance.

    Attributes:
        hidden: Widths of the shared layers.
        num_rounds: Exchanges.
        num_visited: Silos in a round.
        num_head_steps: Of Adam on a head in a visit, on all rows.
        num_kept: The last of them, which the shared layers are then fitted to.
        num_shared_steps: Of Adam on the shared layers in a visit.
        head_step_size: Halved after 10 and after 20 steps of that silo.
        step_size: Of the shared layers.
        prior_scale: Of the heads.
        max_rows: Of a silo that are used.
        shift: Subtracted from the inputs.
        spread: By which they are then divided.
    """

    hidden: tuple[int, ...] = (512, 256, 64)
    num_rounds: int = 20
    num_visited: int = 10
    num_head_steps: int = 10
    num_kept: int = 5
    num_shared_steps: int = 5
    head_step_size: float = 0.1
    step_size: float = 1e-3
    prior_scale: float = 0.999
    max_rows: int = 500
    shift: float = 0.1307
    spread: float = 0.3081

    def num_sent(self, num_inputs: int, num_classes: int) -> int:
        """How many numbers go to a silo in a visit, and as many back: the shared layers, and Adam's moments of them."""
        del num_classes  # heads stay
        return 3 * num_weights([num_inputs, *self.hidden], biases=True)


class PersonalHeads:
    """What `fed_soul` found: shared layers, and draws of each silo's head.

    Attributes:
        visits: How often each silo took part, by name.
    """

    def __init__(self, names, layers, heads, *, visits, shift=0.0, spread=1.0):
        self._names, self._layers, self._heads = list(names), layers, heads
        self._shift, self._spread = shift, spread
        self.visits = dict(zip(names, map(int, visits), strict=True))

    def predict(self, silo: str, x: np.ndarray) -> np.ndarray:
        """Probabilities of the classes, the mean over draws of the head, a row for each of x."""
        position = position_of(silo, self._names)
        own = jax.tree.map(lambda leaf: leaf[position], self._heads)
        return np.asarray(_predict(self._layers, own, (jnp.asarray(x) - self._shift) / self._spread))


def fed_soul(
    silos: Mapping[str, Any], settings: FedSoul | ReportedFedSoul, *, key: Key | int, num_classes: int = 10
) -> PersonalHeads:
    """Run the method on silos that hold `{"x": features, one row each, "y": classes}`.

    Args:
        silos: Data by name.
        settings: `FedSoul()`, the method, or `ReportedFedSoul()`, what was compared with.
        key: Of all randomness.
        num_classes: Number of classes.
    """
    stacked, run_key = stack_labelled("fed_soul", silos, num_classes), as_key(key)
    if isinstance(settings, ReportedFedSoul):
        return _reported(stacked, settings, run_key, num_classes)
    return _langevin(stacked, settings, run_key, num_classes)


def _langevin(stacked: Stacked, settings: FedSoul, key, num_classes):
    num_silos = len(stacked.names)
    start_key, head_key, run_key = jax.random.split(key, 3)
    layers = init_layers(start_key, [stacked.data["x"].shape[-1], *settings.hidden], biases=False)
    shape = (settings.hidden[-1], num_classes)
    shared = {
        "layers": layers,
        "mu": jnp.zeros(shape),
        "log_scale": jnp.full(shape, jnp.log(settings.initial_scale)),
    }
    heads = {"W": settings.initial_scale * jax.random.normal(head_key, (num_silos, *shape))}
    adam = optax.adam(settings.step_size)
    kept = settings.num_local_steps - settings.num_left_out

    def log_head(shared, head):
        return jnp.sum(norm.logpdf(head["W"], shared["mu"], jnp.exp(shared["log_scale"])))

    def log_joint(shared, head, x, y, factor):
        scores = linear(head, features(shared["layers"], x))
        return factor * log_likelihood(scores, y) + log_head(shared, head)

    def draw(shared, head, key, data, rows):
        """The steps of one silo: its last heads, and the mean gradient in what is shared."""

        def step(carry, inputs):
            head, total = carry
            number, key = inputs
            batch_key, noise_key = jax.random.split(key)
            chosen = jax.random.randint(batch_key, (settings.batch_size,), 0, rows)
            arguments = data["x"][chosen], data["y"][chosen], rows / settings.batch_size
            of_shared, of_head = jax.grad(log_joint, (0, 1))(shared, head, *arguments)
            used = number >= settings.num_left_out
            total = jax.tree.map(lambda t, g: t + jnp.where(used, g, 0.0) / kept, total, of_shared)
            noise = jax.random.normal(noise_key, head["W"].shape)
            moved = head["W"] + settings.gamma * of_head["W"] + jnp.sqrt(2 * settings.gamma) * noise
            return ({"W": moved}, total), {"W": moved}

        numbers = jnp.arange(settings.num_local_steps), jax.random.split(key, settings.num_local_steps)
        zeros = jax.tree.map(jnp.zeros_like, shared)
        (head, total), path = jax.lax.scan(step, (head, zeros), numbers)
        return head, total, jax.tree.map(lambda leaf: leaf[settings.num_left_out :], path)

    def everywhere(shared, heads, round, data, rows):
        keys = jax.random.split(jax.random.fold_in(run_key, round), num_silos)
        return jax.vmap(draw, (None, 0, 0, 0, 0))(shared, heads, keys, data, rows)

    def log_prior(shared):
        return sum(jnp.sum(norm.logpdf(leaf)) for leaf in jax.tree.leaves(shared["layers"]))

    @jax.jit
    def one_round(shared, state, heads, round, data, rows):
        heads, gradients, _ = everywhere(shared, heads, round, data, rows)
        uphill = jax.tree.map(lambda g, p: jnp.sum(g, axis=0) + p, gradients, jax.grad(log_prior)(shared))
        shared, state = _optim.ascend(adam, uphill, state, shared)
        return shared, state, heads

    state = _optim.init(adam, shared)
    for round in range(settings.num_rounds):
        shared, state, heads = one_round(shared, state, heads, jnp.asarray(round), stacked.data, stacked.rows)
    # The last average moved what the heads stand on: they go on drawing, without an exchange.
    last = jax.jit(everywhere)(shared, heads, jnp.asarray(settings.num_rounds), stacked.data, stacked.rows)[2]
    return PersonalHeads(stacked.names, shared["layers"], last, visits=[settings.num_rounds] * num_silos)


def _reported(stacked: Stacked, settings: ReportedFedSoul, key, num_classes):
    num_silos = len(stacked.names)
    start_key, head_key, run_key = jax.random.split(key, 3)
    data = {part: leaf[:, : settings.max_rows] for part, leaf in stacked.data.items()}
    data["x"] = (data["x"] - settings.shift) / settings.spread
    rows = jnp.minimum(stacked.rows, settings.max_rows)
    layers = init_layers(start_key, [data["x"].shape[-1], *settings.hidden], biases=True)
    head_keys = jax.random.split(head_key, num_silos)
    start = partial(init_layers, widths=[settings.hidden[-1], num_classes], biases=True)
    heads = jax.vmap(lambda key: start(key)[0])(head_keys)
    halving = optax.piecewise_constant_schedule(settings.head_step_size, {10: 0.5, 20: 0.5})
    head_adam, adam = optax.adam(halving), optax.adam(settings.step_size)
    visited = min(settings.num_visited, num_silos)

    def masked(scores, y, real):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1)[:, 0]
        return jnp.sum(jnp.where(real, chosen, 0.0))

    def visit(carry, silo):
        layers, state, heads, head_states = carry
        x, y = data["x"][silo], data["y"][silo]
        real = jnp.arange(x.shape[0]) < rows[silo]
        head, head_state = jax.tree.map(lambda leaf: leaf[silo], (heads, head_states))
        fixed = features(layers, x)

        def log_joint(head):
            prior = sum(jnp.sum(norm.logpdf(leaf, 0.0, settings.prior_scale)) for leaf in jax.tree.leaves(head))
            return masked(linear(head, fixed), y, real) + prior

        def head_step(carry, _):
            carry = _optim.ascend(head_adam, jax.grad(log_joint)(carry[0]), carry[1], carry[0])
            return carry, carry[0]

        (head, head_state), path = jax.lax.scan(head_step, (head, head_state), length=settings.num_head_steps)
        kept = jax.tree.map(lambda leaf: leaf[-settings.num_kept :], path)

        def shared_objective(layers):
            found = features(layers, x)
            each = jax.vmap(lambda head: masked(linear(head, found), y, real))(kept)
            return num_silos / visited * jnp.mean(each)

        def shared_step(carry, _):
            return _optim.ascend(adam, jax.grad(shared_objective)(carry[0]), carry[1], carry[0]), None

        (layers, state), _ = jax.lax.scan(shared_step, (layers, state), length=settings.num_shared_steps)
        heads, head_states = jax.tree.map(
            lambda every, own: every.at[silo].set(own), (heads, head_states), (head, head_state)
        )
        return (layers, state, heads, head_states), None

    order = [
        jax.random.choice(jax.random.fold_in(run_key, round), num_silos, (visited,), replace=False)
        for round in range(settings.num_rounds)
    ]
    drawn = jnp.concatenate(order)
    head_states = jax.vmap(partial(_optim.init, head_adam))(heads)
    carry = (layers, _optim.init(adam, layers), heads, head_states)
    layers, _, heads, _ = jax.jit(lambda carry, drawn: jax.lax.scan(visit, carry, drawn)[0])(carry, drawn)
    last = jax.tree.map(lambda leaf: leaf[:, None], heads)
    visits = np.bincount(np.asarray(drawn), minlength=num_silos)
    return PersonalHeads(stacked.names, layers, last, visits=visits, shift=settings.shift, spread=settings.spread)


@jax.jit
def _predict(layers, heads, x):
    found = features(layers, x)
    return jnp.mean(jax.vmap(lambda head: jax.nn.softmax(linear(head, found)))(heads), axis=0)
