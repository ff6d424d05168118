"""From text to bags of words, with a vocabulary that silos agree on without showing their texts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..errors import DataError, OptionError
from ..topics import check_bag

EXTRA = "pip install 'sfvi[topics]'"
SHORTEST, LONGEST = 3, 15  # letters of a word


def tokenize(texts: Iterable[str]) -> list[list[str]]:
    """The words of each text: lower case, without accents, numbers and stop words, lemmatized.

    gensim cuts the words and knows the stop words; simplemma finds the lemmas, from a dictionary that comes with it.
    For English: what is not of the letters a to z once accents are gone is left out.
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

    Rare words stay in the silo. A name that many documents hold is told like any other word, and counts are exact: who
    gets two reports, before and after a document came, can tell which told words it holds.

    Args:
        documents: Words of each document.
        threshold: Documents that must hold a word before it is told.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1:
        raise OptionError(f"report_words: threshold is {threshold!r}; give a whole number of at least 1.")
    documents = list(documents)
    _check_words_apart("report_words", documents)
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
    for silo, told in reports.items():
        if not isinstance(told, Mapping) or not all(_is_count(count) for count in told.values()):
            raise DataError(f"agree_on_vocabulary: what silo {silo!r} told is not what `report_words` gives.")
    total: Counter[str] = Counter()
    for told in reports.values():
        total.update(told)
    if len(total) < size:
        silent = ", ".join(repr(silo) for silo, told in reports.items() if not told)
        raise DataError(
            f"agree_on_vocabulary: silos told of {len(total):,} words, fewer than {size:,}"
            + (f" ({silent} of none)" if silent else "")
            + "; lower threshold or size."
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
    documents: Sequence[Sequence[str]], vocabulary: Sequence[str], *, fewest: int = 1, silo: str = ""
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Documents as their different words and how often each occurs, padded with words that occur no times.

    Args:
        documents: Words of each document.
        vocabulary: Words that count; others are left out.
        fewest: Documents with fewer words of the vocabulary are left out.
        silo: Whose documents they are, for messages.

    Returns:
        `{"words": places in the vocabulary, "counts": how often}`, a row for each document, and which documents these
        are.
    """
    who = f"silo {silo!r}" if silo else "bag_of_words"
    if isinstance(vocabulary, str) or len(set(vocabulary)) < len(vocabulary):
        raise OptionError(
            "bag_of_words: the vocabulary is one text, or has a word twice; give a list of words, each once."
        )
    _check_words_apart(who, documents)
    place = {word: number for number, word in enumerate(vocabulary)}
    counted = [Counter(place[word] for word in document if word in place) for document in documents]
    kept = [number for number, counts in enumerate(counted) if counts.total() >= max(fewest, 1)]
    if not kept:
        wanted = "a word" if fewest <= 1 else f"{fewest} words"
        raise DataError(
            f"{who}: none of {len(documents):,} documents holds {wanted} of the vocabulary; leave the silo out"
            + ("." if fewest <= 1 else ", or lower fewest.")
        )
    entries = [sorted(counted[number].items()) for number in kept]
    indptr = np.cumsum([0, *map(len, entries)])
    words, counts = np.array([entry for document in entries for entry in document], np.int64).T
    return padded(indptr, words, counts), np.array(kept)


def padded(indptr: np.ndarray, words: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Documents of a sparse matrix by rows, each as its different words and their counts; empty ones are left out.

    In 16 bits where they are enough.
    """
    ends = np.asarray(indptr)
    if len(words) != len(counts) or ends[0] != 0 or ends[-1] != len(words) or np.any(np.diff(ends) < 0):
        raise DataError(f"padded: indptr does not cut {len(words):,} words and {len(counts):,} counts into documents.")
    lengths = np.diff(ends)
    shape = (int((lengths > 0).sum()), int(lengths.max(initial=1)))
    found = {}
    for part, values in (("words", words), ("counts", counts)):
        least, largest = np.min(values, initial=0), np.max(values, initial=0)
        if np.asarray(values).dtype.kind not in "iu" or least < 0 or largest > np.iinfo(np.uint32).max:
            raise DataError(
                f"padded: {part} hold numbers that are negative, not whole or too large; give whole numbers of at most "
                "32 bits."
            )
        found[part] = np.zeros(shape, np.uint16 if largest <= np.iinfo(np.uint16).max else np.uint32)
        for row, document in enumerate(np.flatnonzero(lengths)):
            found[part][row, : lengths[document]] = values[indptr[document] : indptr[document + 1]]
    return found


def dense(bag: Mapping[str, np.ndarray], num_words: int) -> np.ndarray:
    """Counts of all words, a row for each document; for small parts of a corpus."""
    check_bag(bag, num_words)
    found = np.zeros((len(bag["words"]), num_words), np.float32)
    np.add.at(found, (np.arange(len(found))[:, None], bag["words"]), bag["counts"])
    return found


def _check_words_apart(who, documents):
    """Refuse texts, whose letters would be taken for words."""
    if isinstance(documents, str) or any(isinstance(document, str) for document in documents):
        raise OptionError(f"{who}: a document is a text; give a list of its words (`tokenize` makes them).")


def _is_count(value):
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1
