r"""How good topics are: coherence, diversity, and how well they foresee words.

Documents come as `sfvi.data.text.bag_of_words` gives them. $D(v)$ counts documents that hold word v, $D(u, v)$ those
that hold both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from .errors import DataError, OptionError

Bag = Mapping[str, np.ndarray]
TOP, DIVERSE = 10, 25  # first words of a topic that are looked at


class Occurrences(NamedTuple):
    """In how many documents words occur, alone and together.

    Attributes:
        together: $D(u, v)$; on the diagonal $D(v)$.
        num_documents: Number of documents.
    """

    together: np.ndarray
    num_documents: int

    @property
    def alone(self) -> np.ndarray:
        """$D(v)$ of every word."""
        return np.diag(self.together)


def occurrences(bag: Bag, num_words: int) -> Occurrences:
    """Count in which documents words occur together.

    Args:
        bag: Documents.
        num_words: Length of the vocabulary.
    """
    there: Any = sparse(bag, num_words)
    there.data[:] = 1
    return Occurrences((there.T @ there).toarray(), len(bag["words"]))


def sparse(bag: Bag, num_words: int) -> scipy.sparse.csr_array:
    """Counts as a sparse matrix, a row for each document."""
    check_bag(bag, num_words)
    words, counts = (np.asarray(bag[part]) for part in ("words", "counts"))
    rows, columns = np.nonzero(counts)
    entries = counts[rows, columns].astype(np.int64), (rows, words[rows, columns].astype(np.int64))
    return scipy.sparse.csr_array(entries, shape=(len(words), num_words))


def check_bag(bag: Bag, num_words: int) -> None:
    """Refuse documents that are none: words beyond the vocabulary, counts that do not count.

    Args:
        bag: Documents as `sfvi.data.text.bag_of_words` gives them.
        num_words: Length of the vocabulary.
    """
    words, counts = (np.asarray(bag[part]) for part in ("words", "counts"))
    if words.ndim != 2 or words.shape != counts.shape:
        raise DataError(
            f"words have the shape {words.shape} and counts {counts.shape}; give both a row for each document."
        )
    for part, values in (("words", words), ("counts", counts)):
        whole = values.dtype.kind in "biu" or np.array_equal(values, np.floor(values))
        if not whole or not np.isfinite(values).all() or values.min(initial=0) < 0:
            raise DataError(f"{part} hold numbers that are negative or not whole; give whole numbers of at least 0.")
    last = int(words.max(initial=0))
    if last >= num_words:
        raise DataError(
            f"a document holds word number {last}, but num_words is {num_words}; give its vocabulary's size."
        )
    if not counts.any():
        raise DataError("all counts are zero; give documents with words.")


def top_words(topics: np.ndarray, *, top: int = TOP) -> np.ndarray:
    """The words with the largest entries of each topic, largest first, by their places in the vocabulary."""
    topics = np.asarray(topics)
    if topics.ndim != 2 or not np.isfinite(topics).all():
        raise OptionError(f"topics have shape {topics.shape}; give finite numbers, words on the last axis.")
    if not 1 <= top <= topics.shape[1]:
        raise OptionError(f"top is {top}; give at least 1 and at most the number of words, {topics.shape[1]}.")
    return np.argsort(-topics, axis=1, kind="stable")[:, :top]


def umass(tops: np.ndarray, counts: Occurrences, *, epsilon: float = 1.0) -> np.ndarray:
    r"""UMass coherence of each topic (Mimno et al. 2011), the larger the better; NaN if a word is in no document.

    $$\frac{2}{N(N-1)} \sum_{i > j} \log \frac{D(v_i, v_j) + \epsilon}{D(v_j)}, \quad v_1, \dots, v_N
      \text{ the topic's first words, in its order}$$

    Args:
        tops: As `top_words` gives them.
        counts: In the documents that the topics were fitted to.
        epsilon: $\epsilon$.
    """
    _check_pairs("umass", tops)
    alone, found = np.maximum(counts.alone, 1), []
    for words in tops:
        later, earlier = np.tril_indices(len(words), -1)
        pairs = counts.together[words[later], words[earlier]] + epsilon
        known = np.all(counts.alone[words] > 0)
        found.append(np.mean(np.log(pairs / alone[words[earlier]])) if known else np.nan)
    return np.array(found)


def npmi(tops: np.ndarray, counts: Occurrences) -> np.ndarray:
    r"""Normalized pointwise mutual information of each topic, C_NPMI with whole documents as windows; 1 is the best.

    $$\text{mean over pairs of } \log \frac{P(u, v)}{P(u) P(v)} \Big/ -\log P(u, v), \qquad -1
      \text{ for words that never meet}$$

    Args:
        tops: As `top_words` gives them.
        counts: In reference documents.
    """
    _check_pairs("npmi", tops)
    total = counts.num_documents
    alone = counts.alone
    found = []
    for words in tops:
        later, earlier = np.tril_indices(len(words), -1)
        u, v = words[later], words[earlier]
        both = counts.together[u, v] / total
        apart = np.maximum(alone[u], 1) * np.maximum(alone[v], 1) / total**2
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.log(both / apart) / -np.log(both)
        values = np.where(both == 0, -1.0, np.where(both >= 1, 1.0, values))
        found.append(values.mean())
    return np.array(found)


def _check_pairs(measure, tops):
    """Coherence is of pairs of words."""
    shape = np.shape(tops)
    if len(shape) != 2 or shape[1] < 2:
        raise OptionError(f"{measure}: tops have shape {shape}; give at least two words of each topic.")


def diversity(topics: np.ndarray, *, top: int = DIVERSE) -> float:
    """Share of different words among the first ones of all topics (Dieng et al. 2020)."""
    tops = top_words(topics, top=top)
    return len(np.unique(tops)) / tops.size


def completion(bag: Bag, *, seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Cut the words of each document into two halves at random: one to learn its weights from, one to foresee.

    Documents of fewer than two words are left out of both.
    """
    words, counts = (np.asarray(bag[part]) for part in ("words", "counts"))
    if counts.dtype.kind not in "iu":
        raise DataError(f"completion: counts have the type {counts.dtype}; give whole numbers.")
    generator = np.random.default_rng(seed)
    kept = counts.sum(1) >= 2
    words, counts = words[kept], counts[kept]
    half = np.zeros_like(counts)
    for row, own in enumerate(counts):
        tokens = np.repeat(np.arange(len(own)), own)
        chosen = generator.permutation(tokens)[: len(tokens) // 2]
        half[row] = np.bincount(chosen, minlength=len(own))
    return {"words": words, "counts": half}, {"words": words, "counts": counts - half}


def perplexity(log_probabilities: np.ndarray, bag: Bag) -> float:
    r"""$\exp(-\text{mean over words of } \log p)$.

    Args:
        log_probabilities: Of each document's words, a number for each document.
        bag: Those documents.
    """
    tokens = np.sum(bag["counts"])
    if np.shape(log_probabilities) != (len(bag["counts"]),) or not tokens:
        raise OptionError(
            f"perplexity: there are {np.size(log_probabilities):,} log probabilities and {len(bag['counts']):,} "
            f"documents of {tokens:,} words; give a number for each document, and documents with words."
        )
    return float(np.exp(-np.sum(log_probabilities) / tokens))


def shown(topics: np.ndarray, vocabulary: Sequence[str], *, top: int = TOP) -> list[str]:
    """The first words of each topic, to be read."""
    return [" ".join(str(vocabulary[word]) for word in words) for words in top_words(topics, top=top)]
