r"""ProdLDA as it was published, on pooled documents: a variational autoencoder (Srivastava & Sutton 2017, "AVITM").

$$q(h_d) = \mathcal{N}(\mathrm{BN}(W_\mu e_d), \exp \mathrm{BN}(W_\sigma e_d)), \qquad
  \log p(v \mid d) = \log \mathrm{softmax}(\mathrm{BN}(\mathrm{softmax}(h_d) T))_v$$

$e_d$ is what two layers with softplus make of the counts of document d, with dropout after the second; dropout on
$\mathrm{softmax}(h_d)$ too. BN normalizes over a batch, shifts and does not scale. The prior is the Laplace
approximation of a Dirichlet($\alpha$), $h_d \sim \mathcal{N}(0, (1 - 1/K) / \alpha)$; topics $T$ are point estimates.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from .._random import as_key
from .._types import Key
from ..errors import DataError
from ..topics import check_bag
from ..zoo.options import check_numbers, check_sizes
from ..zoo.prod_lda import spread_out

EPSILON, MOMENTUM = 1e-3, 0.99  # of batch normalization
LEAST_KEPT = 1e-3  # by dropout
AT_ONCE = 500  # documents, when all are looked at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Avitm:
    r"""Settings, by default the published ones.

    Attributes:
        num_topics: K.
        num_hidden: Units of each of the two hidden layers.
        keep: Probability that a unit survives dropout; 1 for no dropout.
        alpha: $\alpha$.
        batch_size: Documents in a step.
        epochs: Passes over the documents.
        step_size: Of Adam.
        momentum: Its $\beta_1$.
    """

    num_topics: int = 21
    num_hidden: int = 100
    keep: float = 0.4
    alpha: float = 1.0
    batch_size: int = 200
    epochs: int = 100
    step_size: float = 0.002
    momentum: float = 0.99

    def __post_init__(self):
        check_sizes("Avitm", least=2, num_topics=self.num_topics, batch_size=self.batch_size)
        check_sizes("Avitm", num_hidden=self.num_hidden, epochs=self.epochs)
        check_numbers("Avitm", above=0.0, alpha=self.alpha, step_size=self.step_size)
        check_numbers("Avitm", above=0.0, below=1.0, momentum=self.momentum)
        if self.keep != 1 or isinstance(self.keep, bool):
            check_numbers("Avitm", above=LEAST_KEPT, below=1.0, keep=self.keep)


class Moments(NamedTuple):
    """Running means and variances of a batch normalization."""

    mean: Float[Array, " n"]
    var: Float[Array, " n"]


class Network(eqx.Module):
    """The trained numbers: encoder, topics, and a shift for each batch normalization."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    loc: eqx.nn.Linear
    log_var: eqx.nn.Linear
    topics: Float[Array, "topics vocab"]
    shifts: dict[str, Float[Array, " n"]]


class AvitmFit(NamedTuple):
    """What came of it.

    Attributes:
        topics: $T$, from which the words of a topic are read.
        network: All of it.
        moments: Of the batch normalizations, for documents one by one.
        elbo: Per document, a number for each epoch.
    """

    topics: np.ndarray
    network: Network
    moments: dict[str, Moments]
    elbo: np.ndarray

    def log_probabilities(self, bag: Mapping[str, np.ndarray]) -> Float[np.ndarray, "docs vocab"]:
        """Of every word in each document, given the words that it has; no dropout, h at its mean."""
        check_bag(bag, self.topics.shape[1])

        @jax.jit
        def some(words, counts):
            outputs = _Pass(self.network, 1.0, None, self.moments)
            everyone = jnp.arange(words.shape[0])
            loc, _ = outputs.encode(spread_out(words, counts, everyone, self.topics.shape[1]))
            return outputs.decode(loc)

        parts = range(0, len(bag["words"]), AT_ONCE)
        rows = [some(*(jnp.asarray(bag[part][at : at + AT_ONCE]) for part in ("words", "counts"))) for at in parts]
        return np.concatenate([np.asarray(found) for found in rows])


class _Pass:
    """One pass through the network: in training, with a key, batches are normalized by themselves."""

    def __init__(self, network: Network, keep: float, key: Any, moments: dict[str, Moments]):
        self.network, self.keep, self.moments = network, keep, moments
        uses = ("hidden", "weights", "noise")
        self.keys = {} if key is None else dict(zip(uses, jax.random.split(key, 3), strict=True))

    def encode(self, counts):
        net = self.network
        hidden = jax.nn.softplus(jax.vmap(net.first)(counts))
        hidden = self._dropout("hidden", jax.nn.softplus(jax.vmap(net.second)(hidden)))
        loc, log_var = jax.vmap(net.loc)(hidden), jax.vmap(net.log_var)(hidden)
        return self._normalize("loc", loc), self._normalize("log_var", log_var)

    def decode(self, h):
        weights = self._dropout("weights", jax.nn.softmax(h))
        return jax.nn.log_softmax(self._normalize("scores", weights @ self.network.topics))

    def _dropout(self, name, values):
        if name not in self.keys:
            return values
        return jnp.where(jax.random.bernoulli(self.keys[name], self.keep, values.shape), values / self.keep, 0.0)

    def _normalize(self, name, values):
        at = self.moments[name]
        if self.keys:
            own = Moments(values.mean(0), values.var(0))
            self.moments = {
                **self.moments,
                name: Moments(*(MOMENTUM * a + (1 - MOMENTUM) * b for a, b in zip(at, own, strict=True))),
            }
            at = own
        return (values - at.mean) / jnp.sqrt(at.var + EPSILON) + self.network.shifts[name]


def loss(
    settings: Avitm, network: Network, moments: dict[str, Moments], counts: Float[Array, "docs vocab"], key: Key
) -> tuple[Float[Array, ""], dict[str, Moments]]:
    r"""$\mathrm{KL}(q(h_d) \,\|\, p) - \log p(n_d \mid h_d)$ at a draw, mean over a batch of documents.

    Args:
        settings: The settings.
        network: The trained numbers.
        moments: Of the batch normalizations so far.
        counts: Of all words of each document.
        key: Of dropout and of the draw.

    Returns:
        The loss, and the moments with those of this batch.
    """
    variance = (1 - 1 / settings.num_topics) / settings.alpha
    run = _Pass(network, settings.keep, key, moments)
    loc, log_var = run.encode(counts)
    noise = jax.random.normal(run.keys["noise"], loc.shape)
    log_likelihood = jnp.sum(counts * run.decode(loc + jnp.exp(0.5 * log_var) * noise), axis=1)
    ratio = jnp.exp(log_var) / variance
    divergence = 0.5 * jnp.sum(ratio + loc**2 / variance - 1.0 - jnp.log(ratio), axis=1)
    return jnp.mean(divergence - log_likelihood), jax.lax.stop_gradient(run.moments)


def avitm(bag: Mapping[str, np.ndarray], settings: Avitm, *, key: Key | int, num_words: int) -> AvitmFit:
    """Fit ProdLDA to pooled documents.

    Args:
        bag: Documents as `sfvi.data.text.bag_of_words` gives them.
        settings: The settings.
        key: Of all randomness.
        num_words: Length of the vocabulary.
    """
    check_bag(bag, num_words)
    words, counts = (jnp.asarray(bag[part]) for part in ("words", "counts"))
    num_documents = words.shape[0]
    if num_documents < 2:
        raise DataError("avitm: give at least two documents; batches of one cannot be normalized.")
    first, run_key = jax.random.split(as_key(key))
    batch = min(settings.batch_size, num_documents)
    steps = max(1, num_documents // batch)
    adam = optax.adam(settings.step_size, b1=settings.momentum)
    terms = jax.value_and_grad(partial(loss, settings), has_aux=True)
    network: Any
    network, moments = _start(first, settings, num_words)

    def step(state, key):
        network, opt_state, moments = state
        draw_key, own_key = jax.random.split(key)
        rows = jax.random.randint(draw_key, (batch,), 0, num_documents)
        drawn = spread_out(words, counts, rows, num_words)
        (value, moments), gradient = terms(network, moments, drawn, own_key)
        updates, opt_state = adam.update(gradient, opt_state, network)
        return (optax.apply_updates(network, updates), opt_state, moments), -value

    @jax.jit
    def epoch(state, key):
        return jax.lax.scan(step, state, jax.random.split(key, steps))

    state, elbo = (network, adam.init(network), moments), []
    for number in range(settings.epochs):
        state, values = epoch(state, jax.random.fold_in(run_key, number))
        elbo.append(float(values.mean()))
        if not np.isfinite(elbo[-1]):
            raise DataError(f"avitm: the loss is not finite in epoch {number + 1}; lower step_size.")
    network, _, moments = state
    return AvitmFit(np.asarray(network.topics), network, moments, np.array(elbo))


def _start(key, settings, num_words):
    """Glorot's uniform weights, no biases."""
    topics, hidden = settings.num_topics, settings.num_hidden
    keys = jax.random.split(key, 5)
    glorot = jax.nn.initializers.glorot_uniform()

    def layer(key, size, out):
        linear = eqx.nn.Linear(size, out, key=key)
        return eqx.tree_at(
            lambda linear: (linear.weight, linear.bias), linear, (glorot(key, (out, size)), jnp.zeros(out))
        )

    sizes = {"loc": topics, "log_var": topics, "scores": num_words}
    network = Network(
        layer(keys[0], num_words, hidden),
        layer(keys[1], hidden, hidden),
        layer(keys[2], hidden, topics),
        layer(keys[3], hidden, topics),
        glorot(keys[4], (topics, num_words)),
        {name: jnp.zeros(size) for name, size in sizes.items()},
    )
    return network, {name: Moments(jnp.zeros(size), jnp.ones(size)) for name, size in sizes.items()}
