"""From text to bags of words, with a vocabulary that silos agree on without showing their texts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..errors import DataError, OptionError
from ..topics import check_words

EXTRA = "pip install 'sfvi[topics]'"
SHORTEST, LONGEST = 3, 15  # letters of a word


def tokenize(texts: Iterable[str]) -> list[list[str]]:
    """The words of each text: lower case, without accents, numbers and stop words, lemmatized.

    gensim cuts the words and knows the stop words; simplemma finds the lemmas, from a dictionary that comes with it.
    """
    if isinstance(texts, str):
        raise OptionError("tokenize: texts is one text; give a list of them.")
    try:
        from gensim.parsing.preprocessing import STOPWORDS
        from gensim.utils import simple_preprocess
        from simplemma import lemmatize
    except ImportError as error:
        raise OptionError(f"tokenize needs gensim and simplemma: {EXTRA}.") from error
    lemmas: dict[str, str] = {}
    found = []
    for text in texts:
        words = []
        for word in simple_preprocess(text, deacc=True, min_len=SHORTEST, max_len=LONGEST):
            if word in STOPWORDS:
                continue
            lemma = lemmas.get(word)
            if lemma is None:
                lemma = lemmas[word] = lemmatize(word, lang="en").lower()
            if len(lemma) >= SHORTEST and lemma not in STOPWORDS and lemma.isascii() and lemma.isalpha():
                words.append(lemma)
        found.append(words)
    return found


def report_words(documents: Iterable[Sequence[str]], *, threshold: int = 10) -> dict[str, int]:
    """What a silo tells of its words: how many of its documents hold each, if at least `threshold` do.

    Rare words, which could be names, stay in the silo.

    Args:
        documents: Words of each document.
        threshold: Documents that must hold a word before it is told.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1:
        raise OptionError(f"report_words: threshold is {threshold!r}; give a whole number of at least 1.")
    counts = Counter(word for document in documents for word in set(document))
    return {word: count for word, count in sorted(counts.items()) if count >= threshold}  # their order tells nothing


def agree_on_vocabulary(reports: Mapping[str, Mapping[str, int]], size: int) -> list[str]:
    """The words that most documents hold, by what silos told; in the order of the alphabet.

    Args:
        reports: What each silo told, by its name.
        size: Number of words.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise OptionError(f"agree_on_vocabulary: size is {size!r}; give a whole number of at least 1.")
    total: Counter[str] = Counter()
    for told in reports.values():
        total.update(told)
    if len(total) < size:
        raise DataError(
            f"agree_on_vocabulary: silos told of {len(total):,} words, fewer than {size:,}; lower threshold or size."
        )
    ranked = sorted(total, key=lambda word: (-total[word], word))
    return sorted(ranked[:size])


def frequencies(reports: Mapping[str, Mapping[str, int]], vocabulary: Sequence[str]) -> np.ndarray:
    """In how many documents each word of the vocabulary occurs, by what silos told.

    Args:
        reports: What each silo told, by its name.
        vocabulary: What they agreed on.
    """
    return np.array([sum(told.get(word, 0) for told in reports.values()) for word in vocabulary])


def bag_of_words(
    documents: Sequence[Sequence[str]], vocabulary: Sequence[str], *, fewest: int = 1
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Documents as their different words and how often each occurs, padded with words that occur no times.

    Args:
        documents: Words of each document.
        vocabulary: Words that count; others are left out.
        fewest: Documents with fewer words of the vocabulary are left out.

    Returns:
        `{"words": places in the vocabulary, "counts": how often}`, a row for each document, and which documents these
        are.
    """
    if len(set(vocabulary)) < len(vocabulary):
        raise OptionError("bag_of_words: a word is twice in the vocabulary; give each once.")
    place = {word: number for number, word in enumerate(vocabulary)}
    counted = [Counter(place[word] for word in document if word in place) for document in documents]
    kept = [number for number, counts in enumerate(counted) if counts.total() >= max(fewest, 1)]
    if not kept:
        raise DataError("bag_of_words: no document holds a word of the vocabulary.")
    entries = [sorted(counted[number].items()) for number in kept]
    indptr = np.cumsum([0, *map(len, entries)])
    words, counts = np.array([entry for document in entries for entry in document], np.int64).T
    return padded(indptr, words, counts), np.array(kept)


def padded(indptr: np.ndarray, words: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Documents of a sparse matrix by rows, each as its different words and their counts; empty ones are left out.

    In 16 bits where they are enough.
    """
    lengths = np.diff(indptr)
    shape = (int((lengths > 0).sum()), int(lengths.max(initial=1)))
    found = {}
    for part, values in (("words", words), ("counts", counts)):
        largest = int(np.max(values, initial=0))
        if largest > np.iinfo(np.uint32).max or np.min(values, initial=0) < 0:
            raise DataError(
                f"padded: {part} hold {largest if largest > 0 else 'negative numbers'}; give 32 bits at most."
            )
        found[part] = np.zeros(shape, np.uint16 if largest <= np.iinfo(np.uint16).max else np.uint32)
        for row, document in enumerate(np.flatnonzero(lengths)):
            found[part][row, : lengths[document]] = values[indptr[document] : indptr[document + 1]]
    return found


def dense(bag: Mapping[str, np.ndarray], num_words: int) -> np.ndarray:
    """Counts of all words, a row for each document; for small parts of a corpus."""
    check_words(bag, num_words)
    found = np.zeros((len(bag["words"]), num_words), np.float32)
    np.add.at(found, (np.arange(len(found))[:, None], bag["words"]), bag["counts"])
    return found
