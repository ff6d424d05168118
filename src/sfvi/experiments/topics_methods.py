"""Topic models fitted in many ways, each measured in the same way."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse

from .. import topics
from ..algorithms import SFVI, AlgorithmOptions, SFVIAvg, Sites
from ..algorithms.elbo import Elbo
from ..baselines import Avitm, avitm
from ..families import Amortized
from ..model import StructuredModel
from ..posterior import GlobalPosterior
from ..results import Fit
from ..silo_fitting import fit_silo
from ..zoo import document_encoder, families_for_topics, prod_lda, word_probabilities
from .base import Result, attempt
from .spec import Rounds
from .topics_corpus import Bag, Corpus

NUM_DRAWS = 50
HELD_OUT_STEPS = 300  # for the weights of held-out documents
TRACE = 200  # points of an ELBO's way that are kept
ELBO_DRAWS = 10  # for the ELBO at the end
TINY = 1e-12
ALPHA, BETA = 1.0, 0.5  # of the published form, unless they are learned; alpha as published
Load = Callable[[], Corpus]


class Variant(NamedTuple):
    r"""Which model, and what is inferred how.

    Attributes:
        form: Of ProdLDA; as published there is a background.
        learned: Whether $\alpha$ and $\beta$ are learned, from their usual start.
        amortized: Whether a network infers documents' latents.
    """

    form: Literal["published", "printed"]
    learned: bool = False
    amortized: bool = False


class Effort(NamedTuple):
    """How much is done, and how fast.

    Attributes:
        num_topics: K.
        batch: Documents of each silo in a step.
        steps: Of SFVI, of silos alone and of pooled documents.
        average: Rounds of SFVI-Avg.
        sites: Rounds of Sites.
        step_size: Of Adam at the start, falling to zero.
        document_step_size: Of documents' own parameters.
        encoder_step_size: Of everything where a network infers documents' latents.
        encoder_steps: Of SFVI there.
    """

    num_topics: int
    batch: int
    steps: int
    average: Rounds
    sites: Rounds
    step_size: float
    document_step_size: float
    encoder_step_size: float
    encoder_steps: int


def model_of(corpus: Corpus, effort: Effort, variant: Variant, batch: int | None) -> StructuredModel:
    """ProdLDA."""
    chosen: dict[str, Any] = {} if variant.learned else {"alpha": ALPHA, "beta": BETA, "fixed": True}
    return prod_lda(
        num_words=corpus.num_words,
        num_topics=effort.num_topics,
        form=variant.form,
        background=variant.form == "published",
        batch_size=batch,
        **chosen,
    )


def options(
    effort: Effort, frequencies: np.ndarray, steps: int, updates: float, encoder: Amortized | None = None
) -> dict[str, Any]:
    """What all algorithms share.

    Args:
        effort: The settings.
        frequencies: In how many documents each word occurs, as far as that is known to who fits.
        steps: Of each silo, in all.
        updates: Of each document, about.
        encoder: An inference network, or None for free parameters.
    """
    rate = effort.encoder_step_size if encoder is not None else effort.step_size
    own = optax.cosine_decay_schedule(effort.document_step_size, max(1, int(updates)), alpha=0.1)
    return {
        "optimizer": optax.adam(optax.cosine_decay_schedule(rate, steps)),
        "local_optimizer": optax.adam(own),
        **families_for_topics(encoder, frequencies=frequencies),
    }


def federated(name: str, variant: Variant, effort: Effort, load: Load, seed: int, state: Path) -> Result:
    """SFVI, SFVI-Avg or Sites over the silos, or SFVI on pooled documents."""
    corpus = load()
    silos, batch = corpus.silos, effort.batch
    if name == "pooled":
        silos, batch = {"all": corpus.pooled()}, effort.batch * len(corpus.silos)
    rounds, per_round = {
        "SFVI": (effort.encoder_steps if variant.amortized else effort.steps, 1),
        "pooled": (effort.steps, 1),
        "SFVI-Avg": effort.average,
        "Sites": effort.sites,
    }[name]
    encoder = None
    if variant.amortized:
        encoder = document_encoder(seed, num_words=corpus.num_words, num_topics=effort.num_topics)
    smallest = min(len(bag["words"]) for bag in silos.values())
    steps = rounds * per_round
    chosen = options(effort, corpus.frequencies, steps, steps * batch / smallest, encoder)
    algorithm: AlgorithmOptions = SFVI(**chosen)
    if name == "SFVI-Avg":
        algorithm = SFVIAvg(num_local_steps=per_round, refit_steps=0, **chosen)
    elif name == "Sites":
        del chosen["optimizer"]  # it takes steps in sds of q(z_G), with a schedule of its own
        algorithm = Sites(num_local_steps=per_round, refit_steps=0, **chosen)
    begin = time.perf_counter()
    model = model_of(corpus, effort, variant, batch)
    found, broke = attempt(model, silos, key=seed, num_rounds=rounds, algorithm=algorithm, checkpoint=state)
    seconds = time.perf_counter() - begin
    sent = {column: found.communication[column].to_numpy() for column in found.communication}
    traffic = int(np.sum(sent["rounds"] * (sent["bytes to a silo"] + sent["bytes from a silo"])))
    alone = name == "pooled"
    extra = {"rounds": 0 if alone else rounds, "bytes": 0 if alone else traffic, "seconds": round(seconds, 1)}
    extra["theta"] = {part: float(value) for part, value in found.theta.items()}
    extra["elbo"] = thinned(found.elbo, per_round)
    extra["elbo at the end"] = round(reached(found, model_of(corpus, effort, variant, None), silos), 1)
    return measured(corpus, *learned(found.posterior, corpus)) | extra | broke


def independent(variant: Variant, effort: Effort, load: Load, seed: int, state: Path) -> Result:
    """Every silo by itself: topics of all silos are listed, scores are means over silos."""
    corpus = load()
    runs, begin = [], time.perf_counter()
    for silo, bag in corpus.silos.items():
        own = topics.occurrences(bag, corpus.num_words).alone
        chosen = options(effort, own, effort.steps, effort.steps * effort.batch / len(bag["words"]))
        model, file = model_of(corpus, effort, variant, effort.batch), state.with_name(f"{state.name}.{silo}")
        rounds = {"num_rounds": effort.steps, "checkpoint": file}
        found, broke = attempt(model, {silo: bag}, key=seed, algorithm=SFVI(**chosen), **rounds)
        runs.append(measured(corpus, *learned(found.posterior, corpus)) | broke)
    together: Result = {part: [one for run in runs for one in run[part]] for part in ("npmi", "umass", "words")}
    together["diversity"] = float(np.mean([run["diversity"] for run in runs]))
    together["perplexity"] = float(np.exp(np.mean(np.log([run["perplexity"] for run in runs]))))
    broken = [run["broke"] for run in runs if "broke" in run]
    together |= {"broke": broken[0]} if broken else {}
    return together | {"rounds": 0, "bytes": 0, "seconds": round(time.perf_counter() - begin, 1)}


def autoencoder(keep: float, epochs: int, effort: Effort, load: Load, seed: int, state: Path) -> Result:
    """ProdLDA as published, on pooled documents."""
    del state  # it takes minutes
    corpus, begin = load(), time.perf_counter()
    settings = Avitm(num_topics=effort.num_topics, keep=keep, epochs=epochs)
    found = avitm(corpus.pooled(), settings, key=seed, num_words=corpus.num_words)
    return _of_pooled(corpus, found.topics, found.log_probabilities(corpus.given), begin)


def random_topics(effort: Effort, load: Load, seed: int, state: Path) -> Result:
    """Topics that know nothing of the documents: what coherence and diversity are worth."""
    del state
    corpus, begin = load(), time.perf_counter()
    drawn = np.random.default_rng(seed).normal(size=(effort.num_topics, corpus.num_words))
    return _of_pooled(corpus, drawn, None, begin)


def word_frequencies(effort: Effort, load: Load, seed: int, state: Path) -> Result:
    """No topics: every document has the words that all have, as often as all have them."""
    del seed, state
    corpus, begin = load(), time.perf_counter()
    often = 1.0 + np.asarray(_matrix(corpus.pooled(), corpus).sum(axis=0)).ravel()
    logs = np.tile(np.log(often / often.sum()), (len(corpus.given["words"]), 1))
    return _of_pooled(corpus, np.tile(often, (effort.num_topics, 1)), logs, begin)


def gensim_lda(passes: int, effort: Effort, load: Load, seed: int, state: Path) -> Result:
    """Online variational Bayes of gensim, which learns its asymmetric priors."""
    from gensim.matutils import Sparse2Corpus
    from gensim.models import LdaModel

    del state
    corpus, begin = load(), time.perf_counter()
    train, given = (
        Sparse2Corpus(scipy.sparse.csr_matrix(_matrix(bag, corpus)), documents_columns=False)
        for bag in (corpus.pooled(), corpus.given)
    )
    words = dict(enumerate(corpus.vocabulary))
    how: dict[str, Any] = {"alpha": "auto", "eta": "auto", "random_state": seed}
    model = LdaModel(train, effort.num_topics, id2word=words, passes=passes, **how)
    weights, _ = model.inference(given)
    found = model.get_topics()
    return _of_pooled(corpus, found, _mixed(weights, found), begin)


def sklearn_lda(passes: int, effort: Effort, load: Load, seed: int, state: Path) -> Result:
    """Online variational Bayes of scikit-learn."""
    from sklearn.decomposition import LatentDirichletAllocation

    del state
    corpus, begin = load(), time.perf_counter()
    how: dict[str, Any] = {"learning_method": "online", "batch_size": 200, "max_iter": passes}
    model = LatentDirichletAllocation(effort.num_topics, random_state=seed, **how)
    model.fit(_matrix(corpus.pooled(), corpus))
    weights = model.transform(_matrix(corpus.given, corpus))
    return _of_pooled(corpus, model.components_, _mixed(weights, model.components_), begin)


def sklearn_nmf(effort: Effort, load: Load, seed: int, state: Path) -> Result:
    """Factors of the tf-idf matrix, which foresee no words."""
    from sklearn.decomposition import NMF
    from sklearn.feature_extraction.text import TfidfTransformer

    del state
    corpus, begin = load(), time.perf_counter()
    weighted = TfidfTransformer().fit_transform(_matrix(corpus.pooled(), corpus))
    how: dict[str, Any] = {"n_components": effort.num_topics, "init": "nndsvdar", "max_iter": 1000}
    model = NMF(random_state=seed, **how).fit(weighted)
    return _of_pooled(corpus, model.components_, None, begin)


def learned(posterior: GlobalPosterior, corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Mean topics, and log probabilities of all words in held-out documents given half of theirs.

    A held-out document is a unit of a silo that comes later: its weights are inferred there, the posterior of topics
    stays. Probabilities are means over draws.
    """
    found = np.asarray(posterior.sample(0, 4 * NUM_DRAWS)["topics"]).mean(0)
    later = fit_silo(posterior, "held out", corpus.given, key=0, num_steps=HELD_OUT_STEPS)
    return found, np.log(word_probabilities(later, 1, num_draws=NUM_DRAWS) + TINY)


def reached(found: Fit, model: StructuredModel, silos: dict[str, Bag]) -> float:
    """The ELBO of all documents where a fit ended; of a minibatch it says more about how long its documents are.

    Args:
        found: The fit.
        model: The same model without minibatches.
        silos: The documents.
    """
    posterior, key = found.posterior, jax.random.key(0)
    elbo = Elbo(SFVI(local_family=posterior.local_family, bound=posterior.bound), model)
    noise = elbo.global_noise(key, posterior.shared, ELBO_DRAWS)

    @jax.jit
    def term(shared, free, data, noise):
        def one(inputs):
            number, noise = inputs
            return elbo.silo(shared, free, elbo.draw(key, number, data, noise[None]), data)

        return jnp.mean(jax.lax.map(one, (jnp.arange(ELBO_DRAWS), noise)))

    total = float(elbo.server(posterior.shared, noise))
    for silo, bag in silos.items():
        total += float(term(posterior.shared, found.silo(silo).free, model.silo_data(silo, bag), noise))
    return total


def measured(corpus: Corpus, found: np.ndarray, logs: np.ndarray | None) -> Result:
    """Coherence of each topic in all documents fitted to, diversity, perplexity of the unseen halves, and the words."""
    counts = topics.occurrences(corpus.pooled(), corpus.num_words)
    tops = topics.top_words(found)
    scores: Result = {
        "npmi": topics.npmi(tops, counts).round(4).tolist(),
        "umass": topics.umass(tops, counts).round(4).tolist(),
        "diversity": round(topics.diversity(found), 4),
        "words": topics.shown(found, corpus.vocabulary),
    }
    if logs is not None:
        by_document = (_matrix(corpus.unseen, corpus).toarray() * logs).sum(1)
        scores["perplexity"] = round(topics.perplexity(by_document, corpus.unseen), 2)
    return scores


def thinned(elbo: np.ndarray, per_round: int) -> list[list[float]]:
    """Steps and ELBO, means over equal stretches of the way."""
    parts = np.array_split(np.asarray(elbo, np.float64), min(TRACE, len(elbo)))
    ends = per_round * np.cumsum([len(part) for part in parts])
    return [ends.tolist(), [round(float(part.mean()), 1) for part in parts]]


def _of_pooled(corpus, found, logs, begin):
    seconds = round(time.perf_counter() - begin, 1)
    return measured(corpus, np.asarray(found), logs) | {"rounds": 0, "bytes": 0, "seconds": seconds}


def _matrix(bag: Bag, corpus: Corpus) -> Any:
    return topics.sparse(bag, corpus.num_words)


def _mixed(weights, found):
    """Log probabilities of words in mixtures of topics, whose shares and words' odds need not add up to one."""
    shares, odds = (values / values.sum(1, keepdims=True) for values in (np.asarray(weights), np.asarray(found)))
    return np.log(shares @ odds + TINY)
