r"""ProdLDA: topics of documents that stay in their silos, as the paper prints it and as it was published.

Both mix topics inside the softmax. $n_{dv}$ counts word v in document d:

$$\log p(n_d \mid T, w_d) = \sum_v n_{dv} \log \mathrm{softmax}(\textstyle\sum_k w_{dk} T_k)_v$$

As printed, $T_k \sim \mathrm{Dirichlet}(\beta)$ and $w_d \sim \mathcal{N}(\alpha, I)$: topics are probabilities of some
thousands of words, so their mixtures are all but flat and the softmax can hardly tell words apart. As published
(Srivastava & Sutton 2017), topics are unnormalized, $T_{kv} \sim \mathcal{N}(0, \beta^2)$, and weights lie on the
simplex, $w_d = \mathrm{softmax}(h_d)$, with $h_d \sim \mathcal{N}(0, (1 - 1/K) / \alpha)$, which is nearly
$w_d \sim \mathrm{Dirichlet}(\alpha)$. $\theta = (\alpha, \beta)$ is learned.
"""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from .._random import as_key
from .._types import Key
from ..errors import OptionError
from ..families import Amortized, amortized
from ..model import StructuredModel


def prod_lda(
    *,
    num_words: int,
    num_topics: int = 21,
    form: Literal["published", "printed"] = "published",
    background: bool = False,
    batch_size: int | None = 200,
    alpha: float | None = None,
    beta: float = 1.0,
    fixed: bool = False,
) -> StructuredModel:
    r"""The model of silos that hold documents as `sfvi.data.text.bag_of_words` gives them.

    Args:
        num_words: Length of the vocabulary.
        num_topics: K.
        form: "published" or "printed".
        background: Whether there is a number for each word that all documents share, $\mathcal{N}(0, 3^2)$, so that
            topics need not tell how frequent words are in general; in published implementations it is the bias of a
            batch normalization.
        batch_size: Documents of a silo in one step; None for all.
        alpha: Where $\alpha$ starts; by default 1 / K as published, 0 as printed.
        beta: Where $\beta$ starts.
        fixed: Whether $\alpha$ and $\beta$ stay as they are.
    """
    if form not in ("published", "printed"):
        raise OptionError(f"prod_lda: form is {form!r}; choose 'published' or 'printed'.")
    printed, shape = form == "printed", (num_topics, num_words)
    if alpha is None:
        alpha = 0.0 if printed else 1.0 / num_topics

    def hyperparameter(name: str, start: float, support: Any) -> Any:
        return start if fixed else numpyro.param(name, start, constraint=support)

    def population():
        spread = hyperparameter("beta", beta, constraints.positive)
        if printed:
            prior = dist.Dirichlet(spread * jnp.ones(num_words)).expand([num_topics]).to_event(1)
        else:
            prior = dist.Normal(0.0, spread).expand(shape).to_event(2)
        topics = numpyro.sample("topics", prior)
        if not background:
            return topics, 0.0
        return topics, numpyro.sample("background", dist.Normal(0.0, 3.0).expand([num_words]).to_event(1))

    def silo(globals_, data):
        topics, common = globals_
        level = hyperparameter("alpha", alpha, constraints.real if printed else constraints.positive)
        num_documents = data["words"].shape[0]
        drawn = num_documents if batch_size is None else min(batch_size, num_documents)
        prior = dist.Normal(level, 1.0) if printed else dist.Normal(0.0, jnp.sqrt((1 - 1 / num_topics) / level))
        with numpyro.plate("documents", num_documents, subsample_size=drawn) as rows:
            h = numpyro.sample("h", prior.expand([num_topics]).to_event(1))
            weights = numpyro.deterministic("weights", h if printed else jax.nn.softmax(h))
            words, counts = (data[part][rows] for part in ("words", "counts"))
            numpyro.factor("n", log_likelihood(common + weights @ topics, words, counts))

    return StructuredModel(population, silo)


def log_likelihood(scores: Float[Array, "docs vocab"], words: Any, counts: Any) -> Float[Array, " docs"]:
    """Log probability of each document's words in their order, up to nothing: no binomial factor is left out.

    Args:
        scores: Of every word of the vocabulary; their softmax is its probability.
        words: The document's words, padded.
        counts: How often each occurs.
    """
    found = jnp.take_along_axis(scores, words.astype(jnp.int32), axis=1)
    counts = counts.astype(scores.dtype)
    return jnp.sum(counts * found, axis=1) - jnp.sum(counts, axis=1) * jax.nn.logsumexp(scores, axis=1)


class _Encoder(eqx.Module):
    """Two hidden layers over the frequencies of words."""

    network: eqx.nn.MLP
    num_words: int = eqx.field(static=True)

    def __call__(self, document):
        counts = jnp.zeros(self.num_words).at[document["words"].astype(jnp.int32)].add(document["counts"])
        return self.network(jnp.log1p(counts))


def document_encoder(
    key: Key | int, *, num_words: int, num_topics: int = 21, num_hidden: int = 100, depth: int = 2
) -> Amortized:
    """The inference network to go with it: a document to means and log scales of its $h$."""
    network = eqx.nn.MLP(num_words, 2 * num_topics, num_hidden, depth, activation=jax.nn.softplus, key=as_key(key))
    return amortized(_Encoder(network, num_words), _documents, plate="documents")


def _documents(data: Any) -> dict[str, jax.Array]:
    return {part: data[part] for part in ("words", "counts")}
