"""Documents for topic models: cut into words, dealt out to silos, with a vocabulary that these agree on."""

from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from .. import topics
from ..data import equally
from ..data.posts import body, newsgroups, published_bag
from ..data.text import agree_on_vocabulary, bag_of_words, frequencies, report_words, tokenize
from ..errors import OptionError

Source = Literal["posts", "avitm", "etm"]
Bag = dict[str, np.ndarray]
PARTS = ("words", "counts")
SLICE_SEED = 0  # which posts are taken if not all are


class Corpus(NamedTuple):
    """What the methods are given.

    Attributes:
        vocabulary: Its words.
        frequencies: Of each, in how many documents it is, by what silos told.
        silos: Documents of each silo.
        given: One half of each held-out document's words.
        unseen: The other half.
    """

    vocabulary: list[str]
    frequencies: np.ndarray
    silos: dict[str, Bag]
    given: Bag
    unseen: Bag

    @property
    def num_words(self) -> int:
        """Length of the vocabulary."""
        return len(self.vocabulary)

    def pooled(self) -> Bag:
        """All documents to fit to."""
        return {part: np.concatenate([bag[part] for bag in self.silos.values()]) for part in PARTS}


@cache
def words_of_posts(num_posts: int) -> list[list[str]]:
    """The words of posts, all of them or some drawn at random."""
    texts = newsgroups().texts
    return tokenize(body(texts[number]) for number in _chosen(num_posts, len(texts)))


@cache
def groups_of_posts(num_posts: int) -> np.ndarray:
    """The newsgroups that the same posts were sent to."""
    groups = newsgroups().groups
    return groups[_chosen(num_posts, len(groups))]


def _chosen(num_posts, known):
    if num_posts > known:
        raise OptionError(f"topics: num_posts is {num_posts:,}; there are {known:,}.")
    return np.sort(np.random.default_rng(SLICE_SEED).permutation(known)[:num_posts])


@cache
def corpus(
    source: Source, num_posts: int, num_words: int, num_silos: int, held_out: int, threshold: int, seed: int
) -> Corpus:
    """Deal documents out.

    Args:
        source: Raw posts, or a bag of words as it was published, whose vocabulary is given and whose test part is held
            out.
        num_posts: How many posts.
        num_words: Of the vocabulary.
        num_silos: Of equal size.
        held_out: Documents to test with.
        threshold: Documents of a silo that must hold a word before the silo tells of it; 1 where a vocabulary is given.
        seed: Of all choices.
    """
    if source == "posts":
        return _of_posts(words_of_posts(num_posts), num_words, num_silos, held_out, threshold, seed)
    found = published_bag(source)
    known = sum(len(found.parts[part]["words"]) for part in ("train", "test"))
    if (num_posts, num_words, threshold) != (known, len(found.vocabulary), 1):
        raise OptionError(
            f"topics: {source!r} has num_posts = {known}, num_words = {len(found.vocabulary)} and threshold = 1."
        )
    if held_out > len(found.parts["test"]["words"]):
        raise OptionError(
            f"topics: held_out is {held_out}; {source!r} has {len(found.parts['test']['words'])} to test with."
        )
    positions = equally(len(found.parts["train"]["words"]), num_silos, seed=seed)
    silos = {silo: _rows(found.parts["train"], rows) for silo, rows in positions.items()}
    generator = np.random.default_rng(seed)
    test = _rows(found.parts["test"], generator.permutation(len(found.parts["test"]["words"]))[:held_out])
    counted = sum(topics.occurrences(bag, len(found.vocabulary)).alone for bag in silos.values())
    return Corpus(found.vocabulary, np.asarray(counted), _even(silos), *topics.completion(test, seed=seed))


def compare_vocabularies(
    num_posts: int, num_words: int, num_silos: int, held_out: int, thresholds: tuple[int, ...], seed: int
) -> dict[str, dict[str, list[int]]]:
    """What a threshold does to the vocabulary, where posts are dealt out at random and where silos differ in subject.

    Args:
        num_posts: How many posts.
        num_words: Of the vocabulary.
        num_silos: Of equal size.
        held_out: Documents that are left out.
        thresholds: Documents of a silo that must hold a word before the silo tells of it.
        seed: Of all choices.

    Returns:
        By split and threshold: words told of, and how many of the vocabulary's a vocabulary of pooled texts has too (0
        where fewer were told than it takes).
    """
    documents, groups = words_of_posts(num_posts), groups_of_posts(num_posts)
    order = _dealt(len(documents), num_silos, held_out, seed)[held_out:]
    central = set(agree_on_vocabulary({"all": report_words([documents[n] for n in order], threshold=1)}, num_words))
    random = [order[rows] for rows in equally(len(order), num_silos, seed=seed).values()]
    sorted_ = np.array_split(order[np.argsort(groups[order], kind="stable")], num_silos)
    found: dict[str, dict[str, list[int]]] = {}
    for split, parts in (("at random", random), ("by newsgroup", sorted_)):
        for threshold in thresholds:
            told = {
                str(silo): report_words([documents[n] for n in rows], threshold=threshold)
                for silo, rows in enumerate(parts)
            }
            known = len(set().union(*told.values()))
            same = len(central.intersection(agree_on_vocabulary(told, num_words))) if known >= num_words else 0
            found.setdefault(split, {})[str(threshold)] = [known, same]
    return found


def _dealt(known, num_silos, held_out, seed):
    """All documents in the order in which they are dealt out, those held out first."""
    if held_out + num_silos > known:
        raise OptionError(f"topics: {held_out:,} documents held out leave none of {known:,}; lower held_out.")
    return np.random.default_rng(seed).permutation(known)


def _of_posts(documents, num_words, num_silos, held_out, threshold, seed):
    order = _dealt(len(documents), num_silos, held_out, seed)
    train = [documents[number] for number in order[held_out:]]
    positions = equally(len(train), num_silos, seed=seed)
    texts = {silo: [train[row] for row in rows] for silo, rows in positions.items()}
    told = {silo: report_words(part, threshold=threshold) for silo, part in texts.items()}
    vocabulary = agree_on_vocabulary(told, num_words)
    silos = {silo: bag_of_words(part, vocabulary, silo=silo)[0] for silo, part in texts.items()}
    test, _ = bag_of_words([documents[number] for number in order[:held_out]], vocabulary)
    return Corpus(vocabulary, frequencies(told, vocabulary), _even(silos), *topics.completion(test, seed=seed))


def _rows(bag: Mapping[str, np.ndarray], rows) -> Bag:
    return {part: bag[part][rows] for part in PARTS}


def _even(silos):
    """Padded to the longest document of all, so that silos can be computed side by side."""
    width = max(bag["words"].shape[1] for bag in silos.values())
    return {
        silo: {part: np.pad(bag[part], [(0, 0), (0, width - bag[part].shape[1])]) for part in PARTS}
        for silo, bag in silos.items()
    }
