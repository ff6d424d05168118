r"""ProdLDA: topics of documents that stay in their silos, as the paper prints it and as it was published.

Both mix topics inside the softmax. $n_{dv}$ counts word v in document d:

$$\log p(n_d \mid T, w_d) = \sum_v n_{dv} \log \mathrm{softmax}(\textstyle\sum_k w_{dk} T_k)_v$$

As printed, $T_k \sim \mathrm{Dirichlet}(\beta)$ and $w_d \sim \mathcal{N}(\alpha, I)$: topics are probabilities of some
thousands of words, so their mixtures are all but flat and the softmax can hardly tell words apart. (The Dirichlet is
written as shares of independent Gamma($\beta$, 1) variables, so that words are treated alike and $q$ is a product.)

As published (Srivastava & Sutton 2017), topics are unnormalized, $T_{kv} \sim \mathcal{N}(0, \beta^2)$, and weights lie
on the simplex, $w_d = \mathrm{softmax}(h_d)$, with $h_d \sim \mathcal{N}(0, (1 - 1/K) / \alpha)$, which is nearly
$w_d \sim \mathrm{Dirichlet}(\alpha)$. $\theta = (\alpha, \beta)$ is learned.
"""

import math
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import constraints
from numpyro.infer import init_to_uniform

from .. import families
from .._random import as_key
from .._types import Key
from ..bounds import elbo
from ..errors import OptionError
from ..families import Amortized, amortized
from ..model import StructuredModel
from ..posterior import SiloPosterior
from ..topics import check_bag
from .options import check_flags, check_numbers, check_sizes

RADIUS, SPREAD = 0.1, 3.0  # where topics start, with documents' own parameters and with an encoder
DOCUMENT_SCALE = 1.0  # as wide as the prior or narrower: else a learned alpha grows while documents are still narrow
WIDEST, GAIN = 4.0, 2.0  # bounds of an encoder's log scales, and of the logarithm of what it multiplies matches by
LOGS, SMALL = 4.0, 0.1  # what logarithms of sizes are divided by, and how small its last layer starts


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

    Fit it with `families_for_topics`. Its sites are `topics`, and of documents `h` and `weights`; `background` if there
    is one, and `sizes` in the printed form.

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
    check_sizes("prod_lda", least=2, num_words=num_words, num_topics=num_topics)
    check_sizes("prod_lda", batch_size=batch_size)
    check_flags("prod_lda", background=background, fixed=fixed)
    check_numbers("prod_lda", above=-math.inf if printed else 0.0, alpha=alpha)
    check_numbers("prod_lda", above=0.0, beta=beta)

    def hyperparameter(name: str, start: float, support: Any) -> Any:
        return start if fixed else numpyro.param(name, start, constraint=support)

    def population():
        spread = hyperparameter("beta", beta, constraints.positive)
        if printed:
            sizes: Any = numpyro.sample("sizes", dist.Gamma(spread, 1.0).expand(shape).to_event(2))
            topics: Any = numpyro.deterministic("topics", sizes / jnp.sum(sizes, axis=1, keepdims=True))
        else:
            topics = numpyro.sample("topics", dist.Normal(0.0, spread).expand(shape).to_event(2))
        if not background:
            return topics
        common: Any = numpyro.sample("background", dist.Normal(0.0, 3.0).expand([num_words]).to_event(1))
        return jnp.concatenate([topics, common[None]])

    def silo(topics, data):
        level = hyperparameter("alpha", alpha, constraints.real if printed else constraints.positive)
        num_documents = data["words"].shape[0]
        drawn = num_documents if batch_size is None else min(batch_size, num_documents)
        prior = dist.Normal(level, 1.0) if printed else dist.Normal(0.0, jnp.sqrt((1 - 1 / num_topics) / level))
        with numpyro.plate("documents", num_documents, subsample_size=drawn) as rows:
            h = numpyro.sample("h", prior.expand([num_topics]).to_event(1))
            weights: Any = numpyro.deterministic("weights", h if printed else jax.nn.softmax(h))
            numpyro.factor("n", log_likelihood(scores_of(weights, topics), data["words"], data["counts"], rows))

    return StructuredModel(population, silo, check=partial(check_bag, num_words=num_words))


def families_for_topics(
    encoder: Amortized | None = None, *, frequencies: Any = None, init_scale: float = 0.05
) -> dict[str, Any]:
    """Options of SFVI, SFVI-Avg and Sites to fit topics with: `SFVI(**families_for_topics())`.

    Mean field, documents that start as wide as their prior, and topics that start at random, since topics that are
    alike stay so. With an encoder they start far apart: it sends documents to the topics that their words fit, and
    where these hardly differ it sends them to one.

    Args:
        encoder: A `document_encoder`; by default every document has parameters of its own.
        frequencies: Where the background starts: in how many documents each word occurs
            (`sfvi.data.text.frequencies`). By default where the topics do.
        init_scale: Standard deviation of topics at the start.
    """
    return {
        "global_family": families.mean_field(),
        "local_family": _own_parameters if encoder is None else encoder,
        "init_loc_fn": partial(_start, RADIUS if encoder is None else SPREAD, frequencies),
        "init_scale": init_scale,
        "bound": elbo(),
    }


def _own_parameters(units, size, parent, scale, dtype):
    """A mean field over each document's latents, which start wider than topics."""
    del scale
    return families.block(coupling="none", within="diagonal")(units, size, parent, DOCUMENT_SCALE, dtype)


def _start(radius, frequencies, site):
    """Where a site's latents start."""
    random: Any = init_to_uniform
    if site["name"] != "background" or frequencies is None:
        return random(site, radius=radius)
    told = np.log(np.maximum(np.asarray(frequencies, np.float64), 1))
    return jnp.asarray(told - told.mean(), jnp.result_type(float))


def word_probabilities(silo: SiloPosterior, key: Key | int, *, num_draws: int = 50) -> Float[np.ndarray, "docs vocab"]:
    """Probability of every word of the vocabulary in each document of a silo, as the mean over posterior draws.

    For documents that come later, `fit_silo` finds their weights first; `sfvi.topics.perplexity` says how well words
    that it has not seen are foreseen.

    Args:
        silo: The silo's posterior, like `fit.silo("north")`.
        key: Of the draws.
        num_draws: How many.
    """
    draws = {site: np.asarray(values) for site, values in silo.sample(key, num_draws).items()}
    total = np.zeros((draws["weights"].shape[1], draws["topics"].shape[2]))
    for number in range(num_draws):
        scores = draws["weights"][number] @ draws["topics"][number]
        if "background" in draws:
            scores = scores + draws["background"][number]
        odds = np.exp(scores - scores.max(1, keepdims=True))
        total += odds / odds.sum(1, keepdims=True) / num_draws
    return total


def scores_of(weights: Float[Array, "docs topics"], topics: Float[Array, "rows vocab"]) -> Float[Array, "docs vocab"]:
    """Mix topics; a row beyond those that have weights is the background, of weight one."""
    if topics.shape[0] > weights.shape[1]:  # in one product: XLA would make the background's noise anew by document
        weights = jnp.concatenate([weights, jnp.ones((weights.shape[0], 1), weights.dtype)], axis=1)
    return weights @ topics


def log_likelihood(scores: Float[Array, "drawn vocab"], words: Any, counts: Any, rows: Any) -> Float[Array, " drawn"]:
    """Log probability of each drawn document's words in their order, up to nothing: no binomial factor is left out.

    Args:
        scores: Of every word of the vocabulary; their softmax is its probability.
        words: The words of all documents, padded.
        counts: How often each occurs.
        rows: The documents drawn.
    """
    often = spread_out(words, counts, rows, scores.shape[1]).astype(scores.dtype)
    return jnp.sum(often * scores, axis=1) - jnp.sum(often, axis=1) * jax.nn.logsumexp(scores, axis=1)


def spread_out(words: Any, counts: Any, rows: Any, num_words: int) -> Float[Array, "drawn vocab"]:
    """The counts of some documents, a column for each word of the vocabulary.

    A loop over the entries that are there: to look scores up at all padded places, and to add gradients there, would
    take several times as long. Those of several silos are laid end to end, for side by side each entry would be a pass
    over the whole.
    """

    @jax.custom_batching.custom_vmap
    def spread(words, counts, rows):
        def document(place, found):
            own_words, own_counts = words[rows[place]].astype(jnp.int32), counts[rows[place]].astype(found.dtype)
            length = jnp.max(jnp.where(own_counts > 0, jnp.arange(1, words.shape[1] + 1), 0))  # up to the last one

            def entry(number, found):
                return found.at[place, own_words[number]].add(own_counts[number])

            return jax.lax.fori_loop(0, length, entry, found)

        start = jnp.zeros((rows.shape[0], num_words), jnp.result_type(float))
        return jax.lax.fori_loop(0, rows.shape[0], document, start)

    @spread.def_vmap
    def several(size, batched, words, counts, rows):
        parts = zip((words, counts, rows), batched, strict=True)
        words, counts, rows = (part if own else jnp.broadcast_to(part, (size, *part.shape)) for part, own in parts)
        offsets = words.shape[1] * jnp.arange(size, dtype=rows.dtype)[:, None]
        flat = (part.reshape(-1, part.shape[2]) for part in (words, counts))
        return spread(*flat, (rows + offsets).reshape(-1)).reshape(size, -1, num_words), True

    return spread(words, jax.lax.stop_gradient(counts), rows)


class _Encoder(eqx.Module):
    r"""Which topics the words of a document speak for, and what a small network makes of it.

    $$m_d = T (n_d - N_d \, \mathrm{softmax}(b + \bar T)), \qquad u_d = (m_d - \bar m_d) / s_d, \qquad
      (r_d, \log\sigma_d, g_d) = f_\phi(u_d, \log N_d, \log s_d), \qquad \mu_d = r_d + e^{g_d} u_d$$

    $N_d$ is the number of words, $b$ the background, $\bar T$ the mean topic and $s_d$ the root mean square of
    $m_d - \bar m_d$, which is, up to a factor, the gradient of $\log p(n_d \mid T, w_d)$ by $h_d$ at equal weights. So
    documents go to the topics that their words fit as soon as topics differ at all. A network that sees words alone has
    to learn which topic is which while topics wait for it, and most of them end up alike. No weight belongs to a word,
    so $\phi$ is small beside $T$. ($m_d$ does not change if a number is added to a topic, so logarithms of the printed
    form's shares do as well.)

    Log scales and $g_d$ are bounded, so that documents of thousands of words do not drive a fit far off.
    """

    network: eqx.nn.MLP
    num_topics: int = eqx.field(static=True)
    num_words: int = eqx.field(static=True)

    def __call__(self, document, z_global):
        if z_global.size not in [rows * self.num_words for rows in (self.num_topics, self.num_topics + 1)]:
            raise OptionError(
                f"document_encoder: it is for {self.num_topics} topics of {self.num_words} words, but the model has "
                f"{z_global.size} global latents; give both the same num_topics and num_words."
            )
        rows = z_global.reshape(-1, self.num_words)
        topics = rows[: self.num_topics]
        words, counts = (document[part][None] for part in ("words", "counts"))
        often = spread_out(words, counts, jnp.zeros(1, jnp.int32), self.num_words)[0]
        length = jnp.sum(often)
        expected = jax.nn.softmax(jnp.mean(topics, axis=0) + jnp.sum(rows[self.num_topics :], axis=0))
        match = topics @ (often - length * expected)
        match = match - jnp.mean(match)
        size = jnp.sqrt(jnp.mean(match**2) + 1e-6)
        seen = jnp.concatenate([match / size, jnp.log(jnp.stack([1.0 + length, 0.1 + size])) / LOGS])
        rest, log_scale, log_gain = jnp.split(self.network(seen), [self.num_topics, 2 * self.num_topics])
        return jnp.concatenate([rest + jnp.exp(_bounded(log_gain, GAIN)) * match / size, _bounded(log_scale, WIDEST)])


def _bounded(values, bound):
    return bound * jnp.tanh(values / bound)


def document_encoder(
    key: Key | int, *, num_words: int, num_topics: int = 21, num_hidden: int = 100, depth: int = 2
) -> Amortized:
    """The inference network to go with it: a document and the topics to means and log scales of the document's $h$.

    `families_for_topics` takes it.

    Args:
        key: Of the weights at the start.
        num_words: Length of the vocabulary.
        num_topics: K.
        num_hidden: Units of a hidden layer.
        depth: How many of them.
    """
    check_sizes("document_encoder", least=2, num_words=num_words, num_topics=num_topics)
    check_sizes("document_encoder", num_hidden=num_hidden, depth=depth)
    sizes = num_topics + 2, 2 * num_topics + 1, num_hidden, depth
    network: Any = eqx.nn.MLP(*sizes, activation=jax.nn.softplus, key=as_key(key))
    last = network.layers[-1]
    network = eqx.tree_at(
        lambda network: (network.layers[-1].weight, network.layers[-1].bias),
        network,
        (SMALL * last.weight, jnp.zeros_like(last.bias)),
    )
    return amortized(_Encoder(network, num_topics, num_words), _documents, plate="documents", follow_globals=True)


def _documents(data: Any) -> dict[str, jax.Array]:
    return {part: data[part] for part in ("words", "counts")}
