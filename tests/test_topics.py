"""Scores of topics: by hand, and against gensim's own."""

import numpy as np
import pytest

from sfvi import topics
from sfvi.data.text import bag_of_words
from sfvi.errors import DataError, OptionError

TEXTS = ["a b c", "a b", "a c d", "b d", "d e", "a b e e"]
DOCUMENTS = [text.split() for text in TEXTS]
VOCABULARY = list("abcde")
BAG, _ = bag_of_words(DOCUMENTS, VOCABULARY)
TOPICS = np.array([[5.0, 4.0, 3.0, 0.0, 0.0], [0.0, 0.0, 1.0, 3.0, 2.0]])


def test_documents_that_hold_words_together():
    found = topics.occurrences(BAG, 5)
    assert found.num_documents == 6
    assert np.diag(found.together).tolist() == [4, 4, 2, 3, 2]
    assert found.together[0, 1] == found.together[1, 0] == 3
    assert topics.sparse(BAG, 5).toarray()[5].tolist() == [1, 1, 0, 0, 2]


@pytest.mark.parametrize("measure", ["u_mass", "c_npmi"])
def test_coherence_is_gensims(measure):
    """gensim takes pairs in the order of the topic and another epsilon; words here have that order too."""
    gensim = pytest.importorskip("gensim")
    from gensim.models.coherencemodel import CoherenceModel

    dictionary = gensim.corpora.Dictionary(DOCUMENTS)
    tops = topics.top_words(TOPICS, top=3)
    lists = [[VOCABULARY[word] for word in words] for words in tops]
    window = {} if measure == "u_mass" else {"window_size": 1000}
    model = CoherenceModel(topics=lists, texts=DOCUMENTS, dictionary=dictionary, coherence=measure, topn=3, **window)
    counts = topics.occurrences(BAG, 5)
    mine = topics.umass(tops, counts, epsilon=1e-12) if measure == "u_mass" else topics.npmi(tops, counts)
    found = model.get_coherence_per_topic()
    np.testing.assert_allclose(mine[0], found[0], atol=1e-6)


def test_umass_by_hand():
    """Pairs (b, a), (c, a), (c, b): 3, 2, 1 documents, of 4 with a and 4 with b."""
    found = topics.umass(topics.top_words(TOPICS, top=3), topics.occurrences(BAG, 5))
    np.testing.assert_allclose(found[0], np.mean(np.log([4 / 4, 3 / 4, 2 / 4])))


def test_a_word_that_is_nowhere_has_no_coherence():
    bag, _ = bag_of_words([["a", "b"], ["b"]], list("abc"))
    found = topics.umass(np.array([[0, 1, 2], [2, 1, 0], [1, 0, 0]]), topics.occurrences(bag, 3))
    assert np.isnan(found).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"words": BAG["words"][:2]}, "words have the shape"),
        ({"words": BAG["words"].astype(int) - 1}, "words hold numbers that are negative"),
        ({"words": BAG["words"] + 0.7}, "words hold numbers that are .* not whole"),
        ({"counts": BAG["counts"] * 0.5}, "counts hold numbers that are .* not whole"),
        ({"counts": np.where(BAG["counts"] > 0, np.nan, 0.0)}, "counts hold"),
        ({"counts": np.where(BAG["counts"] > 0, np.inf, 0.0)}, "counts hold"),
        ({"counts": 0 * BAG["counts"]}, "all counts are zero"),
        ({"words": BAG["words"] + 3}, "word number 7, but num_words is 5"),
    ],
)
def test_what_are_no_documents_is_said(change, says):
    with pytest.raises(DataError, match=says):
        topics.check_bag(BAG | change, 5)


def test_words_that_never_meet_and_words_that_always_do():
    bag, _ = bag_of_words([["a", "b"], ["c"], ["a", "b"]], list("abc"))
    counts = topics.occurrences(bag, 3)
    np.testing.assert_allclose(topics.npmi(np.array([[0, 1], [0, 2]]), counts), [1.0, -1.0])


def test_diversity():
    assert topics.diversity(TOPICS, top=2) == 1.0
    assert topics.diversity(np.ones((4, 5)), top=3) == 0.25
    assert topics.diversity(np.eye(30, 60)[[0, 29]]) == 26 / 50  # of the first 25: 24 are the same


def test_halves_of_documents_add_up():
    one, two = topics.completion(BAG, seed=0)
    np.testing.assert_array_equal(one["counts"] + two["counts"], BAG["counts"])
    assert abs(one["counts"].sum(1).astype(int) - two["counts"].sum(1)).max() <= 1
    again, _ = topics.completion(BAG, seed=0)
    np.testing.assert_array_equal(one["counts"], again["counts"])
    assert not np.array_equal(topics.completion(BAG, seed=1)[0]["counts"], one["counts"])  # at random
    long = {"words": np.array([[0, 1]]), "counts": np.array([[1000, 1000]])}
    assert 440 < topics.completion(long, seed=0)[0]["counts"][0, 0] < 560  # not the first half: 5 sds around 500
    odd = {"words": np.array([[0]]), "counts": np.array([[5]])}
    assert [int(half["counts"].sum()) for half in topics.completion(odd, seed=0)] == [2, 3]
    with pytest.raises(DataError, match="completion: counts have the type float64"):
        topics.completion(BAG | {"counts": BAG["counts"] * 1.0}, seed=0)
    other, _ = topics.completion({"words": BAG["words"][:1], "counts": np.eye(3, dtype=np.uint16)[:1]}, seed=0)
    assert len(other["words"]) == 0


def test_perplexity_of_equal_odds_is_the_number_of_words():
    tokens = BAG["counts"].sum(1)
    np.testing.assert_allclose(topics.perplexity(-np.log(5) * tokens, BAG), 5.0)
    with pytest.raises(OptionError, match="1 log probabilities and 6 documents"):
        topics.perplexity(np.zeros(1), BAG)


def test_topics_to_be_read_and_bad_ones():
    assert topics.shown(TOPICS, VOCABULARY, top=2) == ["a b", "d e"]
    with pytest.raises(OptionError, match="give finite numbers"):
        topics.top_words(np.array([[np.nan, 1.0]]))
    with pytest.raises(OptionError, match=r"top is 10; .* number of words, 3"):
        topics.top_words(np.eye(3))
    with pytest.raises(OptionError, match="umass: tops have shape"):
        topics.umass(np.array([[1], [2]]), topics.occurrences(BAG, 5))
    with pytest.raises(DataError, match="word number 4, but num_words is 3"):
        topics.occurrences(BAG, 3)
