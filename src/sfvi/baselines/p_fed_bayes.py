"""pFedBayes (Zhang et al. 2022): a Gaussian over the weights of each silo's network, held near a shared one."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import _optim
from .._random import as_key
from .._types import Key
from .networks import init_layers, log_likelihood, logits, num_weights
from .stacking import position_of, stack_labelled


@dataclasses.dataclass(frozen=True)
class PFedBayes:
    r"""Settings of `p_fed_bayes`.

    Silo i minimizes $-E_{q_i} \log p(D_i) + \zeta\, \mathrm{KL}(q_i \| w)$, the server
    $\sum_i \mathrm{KL}(q_i \| w)$; $q_i$ and $w$ are diagonal Gaussians with $\sigma = \log(1 + e^\rho)$.

    Attributes:
        hidden: Width of the hidden layer.
        biases: Whether layers have them.
        num_rounds: Exchanges.
        num_local_updates: In one round.
        num_personal_steps: Of Adam on $q_i$ in one local update.
        step_size: Of Adam.
        zeta: $\zeta$.
        kl_parts: Into how many minibatches a KL term is divided, of which the rows follow in a fixed order. None for
            the objective itself: rows are drawn anew and their log-likelihood is scaled up to all.
        batch_size: Rows in a step.
        noise: Standard deviation of the draws; 1 is the method, other numbers are not.
        initial_rho: $\rho$ at the start.
        exact_server: Whether the server solves its problem: $w$ has the mean and variance of the mixture of the
            $q_i$. Otherwise a silo moves its copy of $w$ by one step of Adam in each local update, and the server takes
            the means of $\mu$ and $\rho$, weighted by rows.
        shift: Subtracted from the inputs.
        spread: By which they are then divided.
    """

    hidden: int
    biases: bool
    num_rounds: int
    num_local_updates: int
    num_personal_steps: int
    step_size: float
    zeta: float
    kl_parts: int | None
    batch_size: int
    noise: float
    initial_rho: float
    exact_server: bool
    shift: float
    spread: float

    @classmethod
    def reported(cls) -> "PFedBayes":
        """What the paper's comparison evidently ran: the defaults of a public implementation."""
        return cls(100, True, 10, 20, 5, 1e-3, 10.0, 20, 100, 0.001, -3.0, False, 0.5, 0.5)

    @classmethod
    def fair(
        cls,
        *,
        num_rounds: int = 20,
        num_local_updates: int = 100,
        batch_size: int = 100,
        step_size: float = 5e-3,
        zeta: float = 0.1,
    ) -> "PFedBayes":
        """The method as its authors define it, with the network, rounds and batches of ours.

        Step size and weight of the KL term are those that held-out images of MNIST choose.
        """
        steps = num_rounds, num_local_updates, 1, step_size
        return cls(64, False, *steps, zeta, None, batch_size, 1.0, -3.0, True, 0.0, 1.0)

    def num_sent(self, num_inputs: int, num_classes: int) -> int:
        r"""How many numbers go to a silo in an exchange, and as many back: $\mu$ and $\rho$ of all weights."""
        return 2 * num_weights([num_inputs, self.hidden, num_classes], biases=self.biases)


class PersonalGaussians:
    """What `p_fed_bayes` found: a Gaussian over networks for each silo."""

    def __init__(self, names, settings: PFedBayes, personal: dict):
        self._names, self._settings, self._personal = list(names), settings, personal

    def predict(self, silo: str, x: np.ndarray, *, num_samples: int = 100, key: Key | int = 0) -> np.ndarray:
        """Probabilities of the classes, the mean over draws, a row for each of x."""
        position, settings = position_of(silo, self._names), self._settings
        own = jax.tree.map(lambda leaf: leaf[position], self._personal)
        return np.asarray(_predict(own, _scaled(jnp.asarray(x), settings), settings.noise, as_key(key), num_samples))


def p_fed_bayes(silos: Mapping[str, Any], settings: PFedBayes, *, key: Key | int, num_classes: int = 10):
    """Run the method on silos that hold `{"x": features, one row each, "y": classes}`.

    Args:
        silos: Data by name.
        settings: `PFedBayes.reported()`, `PFedBayes.fair()`, or others.
        key: Of all randomness.
        num_classes: Number of classes.
    """
    stacked, run_key = stack_labelled("p_fed_bayes", silos, num_classes), as_key(key)
    data = {"x": _scaled(stacked.data["x"], settings), "y": stacked.data["y"]}
    widths = [data["x"].shape[-1], settings.hidden, num_classes]
    adam = optax.adam(settings.step_size)

    def start(key):
        shapes = jax.eval_shape(lambda: init_layers(key, widths, biases=settings.biases))
        loc = jax.tree.map(lambda leaf: 0.1 * leaf, _noise_tree(key, shapes))
        return {"loc": loc, "rho": jax.tree.map(lambda leaf: jnp.full(leaf.shape, settings.initial_rho), loc)}

    shared = start(run_key)
    many = jnp.zeros(len(stacked.names))
    personal = jax.tree.map(lambda leaf: jnp.tile(leaf, (len(many),) + (1,) * leaf.ndim), shared)
    states = jax.vmap(lambda own: (_optim.init(adam, own), _optim.init(adam, own)))(personal)
    local = _local_round(settings, adam)

    @jax.jit
    def one_round(shared, personal, states, round, data, rows):
        keys = jax.random.split(jax.random.fold_in(run_key, round), len(many))
        personal, near, states = jax.vmap(local, (0, None, 0, 0, 0, 0, None))(
            personal, shared, states, keys, data, rows, round
        )
        return _mixture(personal) if settings.exact_server else _average(near, rows), personal, states

    for round in range(settings.num_rounds):
        shared, personal, states = one_round(shared, personal, states, jnp.asarray(round), data, stacked.rows)
    return PersonalGaussians(stacked.names, settings, personal)


def _local_round(settings, adam):
    """A silo's work in one round: its Gaussian, and its copy of the shared one, after the local updates."""

    def local(personal, shared, states, key, data, rows, round):
        size = settings.batch_size
        batches = (rows + size - 1) // size
        parts = settings.kl_parts or 1
        used = jnp.minimum(rows, size)  # of a batch that is larger than the silo
        factor = rows / size if settings.kl_parts is None else used / size

        def objective(personal, near, key, x, y):
            scores = logits(_draw(personal, key, settings.noise), x)
            return factor * log_likelihood(scores, y) - settings.zeta / parts * _kl(personal, near)

        def update(carry, number):
            personal, near, (personal_state, near_state) = carry
            if settings.kl_parts is None:
                chosen = jax.random.randint(jax.random.fold_in(key, -1 - number), (size,), 0, rows)
            else:
                begin = (round * settings.num_local_updates + number) % batches * size
                chosen = (begin + jnp.arange(size)) % rows
            x, y = data["x"][chosen], data["y"][chosen]

            def step(carry, key):
                uphill = jax.grad(objective)(carry[0], near, key, x, y)
                return _optim.ascend(adam, uphill, carry[1], carry[0]), None

            keys = jax.random.split(jax.random.fold_in(key, number), settings.num_personal_steps)
            (personal, personal_state), _ = jax.lax.scan(step, (personal, personal_state), keys)
            if not settings.exact_server:
                uphill = jax.grad(lambda near: -settings.zeta / parts * _kl(personal, near))(near)
                near, near_state = _optim.ascend(adam, uphill, near_state, near)
            return (personal, near, (personal_state, near_state)), None

        numbers = jnp.arange(settings.num_local_updates)
        return jax.lax.scan(update, (personal, shared, states), numbers)[0]

    return local


def _scaled(x, settings):
    return (jnp.asarray(x, jnp.result_type(float)) - settings.shift) / settings.spread


def _draw(gaussian, key, noise):
    return jax.tree.map(
        lambda loc, rho, white: loc + noise * jax.nn.softplus(rho) * white,
        gaussian["loc"],
        gaussian["rho"],
        _noise_tree(key, gaussian["loc"]),
    )


def _noise_tree(key, tree):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten(
        [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    )


def _kl(one, other):
    """KL divergence of diagonal Gaussians."""

    def part(loc, rho, other_loc, other_rho):
        scale, other_scale = jax.nn.softplus(rho), jax.nn.softplus(other_rho)
        return jnp.sum(jnp.log(other_scale / scale) + (scale**2 + (loc - other_loc) ** 2) / (2 * other_scale**2) - 0.5)

    return sum(jax.tree.leaves(jax.tree.map(part, one["loc"], one["rho"], other["loc"], other["rho"])))


def _average(near, rows):
    weights = rows / rows.sum()
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), near)


def _mixture(personal):
    r"""The Gaussian nearest to all, $\arg\min_w \sum_i \mathrm{KL}(q_i \| w)$: mean and variance of their mixture."""
    loc = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), personal["loc"])

    def rho(locs, rhos, center):
        variance = jnp.mean(jax.nn.softplus(rhos) ** 2 + (locs - center) ** 2, axis=0)
        return _inverse_softplus(jnp.sqrt(variance))

    return {"loc": loc, "rho": jax.tree.map(rho, personal["loc"], personal["rho"], loc)}


def _inverse_softplus(value):
    return value + jnp.log(-jnp.expm1(-value))


@partial(jax.jit, static_argnames="num_samples")
def _predict(own, x, noise, key, num_samples):
    def add(total, key):
        return total + jax.nn.softmax(logits(_draw(own, key, noise), x)), None

    classes = own["loc"][-1]["W"].shape[1]
    total, _ = jax.lax.scan(add, jnp.zeros((x.shape[0], classes)), jax.random.split(key, num_samples))
    return total / num_samples
