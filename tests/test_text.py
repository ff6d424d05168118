"""From text to bags of words: cleaning, and a vocabulary agreed on without pooling."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfvi.data import posts as module
from sfvi.data.text import agree_on_vocabulary, bag_of_words, dense, frequencies, padded, report_words, tokenize
from sfvi.errors import DataError, OptionError

POST = """From: someone@somewhere.edu (Some One)
Subject: Re: engines
Lines: 7

In article <123@x.edu> other@y.edu (Other) writes:
> My engines are broken

The cars' engines were running badly yesterday.
I've bought 2 new ones!
MAX>'AX>'AX>'AX>'AX>'AX>'AX>'AX>'AX>'AX>'AX>'AX>'AX>'AX>'AX<

--
Some One, University of Somewhere
"""
words = st.sampled_from("abcdefghij")
documents = st.lists(st.lists(words, min_size=1, max_size=6), min_size=1, max_size=12)


def test_header_quotes_and_signature_go():
    kept = module.body(POST)
    assert "engines were running" in kept
    for gone in ("somewhere.edu", "article", "broken", "University", "MAX"):
        assert gone not in kept


def test_words_are_lemmas_without_stop_words():
    assert tokenize([module.body(POST), ""]) == [["car", "engine", "run", "badly", "yesterday", "buy", "new"], []]


@given(documents, st.integers(1, 4), st.integers(1, 3))
def test_vocabulary_does_not_depend_on_the_split_if_all_is_told(texts, num_silos, size):
    """With a threshold of one; otherwise only words that a silo holds often are told."""
    size = min(size, len({word for text in texts for word in text}))
    silos = {str(j): texts[j::num_silos] for j in range(min(num_silos, len(texts)))}
    told = {name: report_words(part, threshold=1) for name, part in silos.items()}
    assert agree_on_vocabulary(told, size) == agree_on_vocabulary({"all": report_words(texts, threshold=1)}, size)
    for part in silos.values():
        for word, count in report_words(part, threshold=2).items():
            assert count == sum(word in text for text in part) >= 2


@given(documents)
def test_bags_hold_every_word_as_often_as_the_text(texts):
    vocabulary = list("acegi")
    known = [[word for word in text if word in vocabulary] for text in texts]
    if not any(known):
        with pytest.raises(DataError, match=f"silo 'a': none of {len(texts)} documents holds a word"):
            bag_of_words(texts, vocabulary, silo="a")
        return
    bag, kept = bag_of_words(texts, vocabulary)
    assert kept.tolist() == [number for number, text in enumerate(known) if text]
    expected = [[known[number].count(word) for word in vocabulary] for number in kept]
    np.testing.assert_array_equal(dense(bag, len(vocabulary)), expected)
    assert bag["words"].dtype == bag["counts"].dtype == np.uint16


def test_many_words_and_large_counts_are_kept():
    bag = padded(np.array([0, 2, 2, 3]), np.array([1, 70_000, 5]), np.array([1, 2, 100_000]))
    assert bag["words"].tolist() == [[1, 70_000], [5, 0]]
    assert bag["counts"].tolist() == [[1, 2], [100_000, 0]]
    with pytest.raises(DataError, match=r"counts hold numbers that are .* too large"):
        padded(np.array([0, 1]), np.array([1]), np.array([5_000_000_000]))


def test_what_a_silo_tells_is_counts_and_nothing_else():
    """Not which words stand together: in the order of first occurrence the words of each document would be in a row."""
    texts = [["z", "b"], ["a", "z", "z"], ["b"], ["c"]]
    told = report_words(texts, threshold=2)
    assert list(told.items()) == [("b", 2), ("z", 2)]  # as often as the threshold is enough
    assert list(report_words(texts[::-1], threshold=2).items()) == list(told.items())
    assert frequencies({"one": told, "two": {"a": 5, "z": 3}}, ["a", "b", "z"]).tolist() == [5, 2, 5]


def test_short_documents_are_left_out():
    bag, kept = bag_of_words([["a"], ["a", "b"], ["a", "x"]], ["a", "b"], fewest=2)
    assert kept.tolist() == [1]
    assert dense(bag, 2).tolist() == [[1, 1]]
    with pytest.raises(DataError, match=r"holds 3 words of the vocabulary.*or lower fewest"):
        bag_of_words([["a", "b"]], ["a", "b"], fewest=3)


def test_bad_input():
    for what in (lambda: report_words(["a text"]), lambda: bag_of_words(["a text"], ["a"], silo="north")):
        with pytest.raises(
            OptionError, match=r"(report_words|'north'): a document is a text; give a list of its words"
        ):
            what()
    with pytest.raises(DataError, match="what silo 'b' told is not"):
        agree_on_vocabulary({"a": {"x": 3}, "b": {"x": -1}}, 1)
    with pytest.raises(DataError, match="fewer than 2 \\('b' of none\\); lower"):
        agree_on_vocabulary({"a": {"x": 3}, "b": {}}, 2)
    with pytest.raises(DataError, match="words hold numbers that are negative"):
        padded(np.array([0, 2]), np.array([-1, 7]), np.array([1, 1]))
    with pytest.raises(DataError, match="indptr does not cut 2 words"):
        padded(np.array([0, 3]), np.array([1, 7]), np.array([1, 1]))
    with pytest.raises(OptionError, match="threshold is 0"):
        report_words([["a"]], threshold=0)
    with pytest.raises(DataError, match="told of 1 words, fewer than 2"):
        agree_on_vocabulary({"a": {"x": 3}}, 2)
    with pytest.raises(OptionError, match="size is 0"):
        agree_on_vocabulary({"a": {"x": 3}}, 0)
    with pytest.raises(OptionError, match="texts is one text"):
        tokenize("one text")
    with pytest.raises(DataError, match="word number 1, but num_words is 1"):
        dense(bag_of_words([["a", "b"]], ["a", "b"])[0], 1)
    with pytest.raises(OptionError, match="twice"):
        bag_of_words([["a"]], ["a", "a"])
    with pytest.raises(DataError, match="'avitm' or 'etm'"):
        module.published_bag("nips")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SFVI_DATA", str(tmp_path))
    monkeypatch.setattr(module, "NUM_POSTS", 2)
    (tmp_path / "newsgroups20").mkdir()
    return tmp_path / "newsgroups20"


def test_both_kinds_of_files_are_read(folder):
    with pytest.raises(DataError, match=r"neither 20news_bydate_raw.jsonl.gz nor 20news-bydate.tar.gz"):
        module.newsgroups()
    with tarfile.open(folder / module.ARCHIVE, "w:gz") as archive:
        for name in ("20news-bydate-test/sci.med/7", "20news-bydate-train/sci.space/9"):
            content = f"text of {name[-1]} \xe9".encode("latin-1")
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    from_archive = module.newsgroups()
    assert from_archive.texts == ["text of 9 \xe9", "text of 7 \xe9"]
    assert from_archive.groups.tolist() == ["sci.space", "sci.med"]
    assert from_archive.train.tolist() == [True, False]
    rows = [("test", "sci.med", "7"), ("train", "sci.space", "9")]
    with gzip.open(folder / module.RAW, "wt") as file:
        for subset, group, number in rows:
            text = f"text of {number} \xe9"
            file.write(json.dumps({"subset": subset, "group": group, "id": number, "text": text}) + "\n")
    from_lines = module.newsgroups()
    assert from_lines.texts == from_archive.texts


def test_damaged_bags_are_refused(folder):
    (folder / "20news_avitm_vocab.txt").write_text("a b c")
    (folder / "20news_avitm_bow.npz").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"published_bag: the files of avitm .* cannot be read"):
        module.published_bag("avitm")
    parts = {"indptr": [0, 1], "indices": [9], "counts": [1]}
    np.savez(folder / "20news_avitm_bow.npz", **{f"train_{kind}": np.array(part) for kind, part in parts.items()})
    with pytest.raises(DataError, match="holds word number 9, but num_words is 3"):
        module.published_bag("avitm")


def test_damaged_files_are_refused(folder):
    (folder / module.RAW).write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read"):
        module.newsgroups()
    with gzip.open(folder / module.RAW, "wt") as file:
        file.write(json.dumps({"subset": "train", "group": "a", "id": "1", "text": ""}) + "\n")
    with pytest.raises(DataError, match="1 posts instead of 2"):
        module.newsgroups()
