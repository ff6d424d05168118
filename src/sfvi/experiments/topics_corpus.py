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
        in_common: Words that a vocabulary of pooled texts would share with this one; None where it was given.
    """

    vocabulary: list[str]
    frequencies: np.ndarray
    silos: dict[str, Bag]
    given: Bag
    unseen: Bag
    in_common: int | None

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
    if num_posts > len(texts):
        raise OptionError(f"topics: num_posts is {num_posts:,}; there are {len(texts):,}.")
    chosen = np.sort(np.random.default_rng(SLICE_SEED).permutation(len(texts))[:num_posts])
    return tokenize(body(texts[number]) for number in chosen)


@cache
def corpus(
    source: Source, num_posts: int, num_words: int, num_silos: int, held_out: int, threshold: int, seed: int
) -> Corpus:
    """Deal documents out.

    Args:
        source: Raw posts, or a bag of words as it was published, whose vocabulary is given and whose test part is held
            out.
        num_posts: How many posts.
        num_words: Of the vocabulary, for posts.
        num_silos: Of equal size.
        held_out: Documents to test with.
        threshold: Documents of a silo that must hold a word before the silo tells of it.
        seed: Of all choices.
    """
    if source == "posts":
        return _of_posts(words_of_posts(num_posts), num_words, num_silos, held_out, threshold, seed)
    found = published_bag(source)
    positions = equally(len(found.parts["train"]["words"]), num_silos, seed=seed)
    silos = {silo: _rows(found.parts["train"], rows) for silo, rows in positions.items()}
    generator = np.random.default_rng(seed)
    test = _rows(found.parts["test"], generator.permutation(len(found.parts["test"]["words"]))[:held_out])
    counted = sum(topics.occurrences(bag, len(found.vocabulary)).alone for bag in silos.values())
    return Corpus(found.vocabulary, np.asarray(counted), _even(silos), *topics.completion(test, seed=seed), None)


def _of_posts(documents, num_words, num_silos, held_out, threshold, seed):
    if held_out + num_silos > len(documents):
        raise OptionError(f"topics: {held_out:,} documents held out leave none of {len(documents):,}; lower held_out.")
    order = np.random.default_rng(seed).permutation(len(documents))
    train = [documents[number] for number in order[held_out:]]
    positions = equally(len(train), num_silos, seed=seed)
    texts = {silo: [train[row] for row in rows] for silo, rows in positions.items()}
    told = {silo: report_words(part, threshold=threshold) for silo, part in texts.items()}
    vocabulary = agree_on_vocabulary(told, num_words)
    central = agree_on_vocabulary({"all": report_words(train, threshold=1)}, num_words)
    silos = {silo: bag_of_words(part, vocabulary, silo=silo)[0] for silo, part in texts.items()}
    test, _ = bag_of_words([documents[number] for number in order[:held_out]], vocabulary)
    halves = topics.completion(test, seed=seed)
    return Corpus(vocabulary, frequencies(told, vocabulary), _even(silos), *halves, len(set(vocabulary) & set(central)))


def _rows(bag: Mapping[str, np.ndarray], rows) -> Bag:
    return {part: bag[part][rows] for part in PARTS}


def _even(silos):
    """Padded to the longest document of all, so that silos can be computed side by side."""
    width = max(bag["words"].shape[1] for bag in silos.values())
    return {
        silo: {part: np.pad(bag[part], [(0, 0), (0, width - bag[part].shape[1])]) for part in PARTS}
        for silo, bag in silos.items()
    }
