"""Topics in miniature: invented posts, all methods, a few steps."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from sfvi import topics
from sfvi.errors import OptionError
from sfvi.experiments import EXPERIMENTS, reproduce, topics_corpus, topics_methods
from sfvi.experiments.spec import read
from sfvi.experiments.store import Store
from sfvi.experiments.topics_claims import OF_OURS, OF_THE_PAPER, Claim, judged
from sfvi.experiments.topics_methods import thinned

TINY = """
[presets.tiny]
corpus = "posts"
num_posts = 90
num_words = 40
threshold = 1
silos = 2
held_out = 10
seeds = [0]
models = ["published", "printed"]
topics = 3
batch = 20
steps = 4
average = { rounds = 2, steps = 2 }
sites = { rounds = 2, steps = 2 }
step_size = 0.01
document_step_size = 0.05
encoder_step_size = 0.002
encoder_steps = 3
epochs = 2
passes = 2
"""


@pytest.fixture
def newsgroups():
    """Skip where the posts are not on this machine."""
    folder = os.environ.get("SFVI_DATA")
    if not folder or not (Path(folder) / "newsgroups20").is_dir():
        pytest.skip("needs 20 Newsgroups: set SFVI_DATA to a folder with newsgroups20/")
    topics_corpus.corpus.cache_clear()


@pytest.fixture
def posts(monkeypatch):
    """Words of three subjects, as `words_of_posts` would give them."""
    generator = np.random.default_rng(0)
    subjects = [[f"{letter}{number}" for number in range(14)] for letter in "abc"]
    found = [list(generator.choice(subjects[number % 3], 12)) for number in range(90)]
    topics_corpus.corpus.cache_clear()
    monkeypatch.setattr(topics_corpus, "words_of_posts", lambda num_posts: found[:num_posts])
    monkeypatch.setattr(topics_corpus, "groups_of_posts", lambda num_posts: np.arange(num_posts) % 3)
    yield found
    topics_corpus.corpus.cache_clear()


def test_documents_are_dealt_out_once(posts):
    found = topics_corpus.corpus("posts", 90, 42, 2, 10, 1, 0)
    assert [len(bag["words"]) for bag in found.silos.values()] == [40, 40]
    assert len(found.vocabulary) == 42
    tokens = sum(int(bag["counts"].sum()) for bag in (*found.silos.values(), found.given, found.unseen))
    assert tokens == 90 * 12


def test_the_vocabulary_is_what_silos_tell_of(posts):
    """Every word is in at least as many documents of one silo as the threshold says, and is counted in such silos."""
    found = topics_corpus.corpus("posts", 90, 25, 2, 10, 8, 0)
    counts = np.array([topics.occurrences(bag, 25).alone for bag in found.silos.values()])
    assert counts.max(axis=0).min() >= 8 > counts.min()
    np.testing.assert_array_equal(found.frequencies, np.where(counts >= 8, counts, 0).sum(axis=0))


def test_vocabularies_are_compared(posts):
    found = topics_corpus.compare_vocabularies(90, 30, 3, 0, (1, 12, 80), 0)
    assert found["at random"]["1"] == found["by newsgroup"]["1"] == [42, 30]
    assert found["at random"]["80"] == [0, 0]
    assert found["by newsgroup"]["12"][0] > found["at random"]["12"][0]  # a subject's words are all in one silo


@pytest.mark.parametrize(
    "method",
    [
        ("LDA", "gensim"),
        ("LDA", "scikit-learn"),
        ("autoencoder", "AVITM"),
        ("published", "SFVI"),
        ("nothing learned", "word frequencies"),
    ],
    ids=str,
)
def test_nothing_is_learned_from_what_is_to_be_foreseen(posts, tmp_path, monkeypatch, float32, method):
    """Neither the other halves of held-out documents nor which words do not occur change any prediction."""
    seen = []
    measured = topics_methods.measured

    def kept(corpus, found, logs):
        seen.append((found, logs))
        return measured(corpus, found, logs)

    monkeypatch.setattr(topics_methods, "measured", kept)
    (tmp_path / "spec.toml").write_text(TINY)
    experiment = read(tmp_path, EXPERIMENTS["topics"], "tiny")
    corpus = topics_corpus.corpus("posts", 90, 40, 2, 10, 1, 0)
    given = {"words": np.where(corpus.given["counts"] > 0, corpus.given["words"], 0), "counts": corpus.given["counts"]}
    other = corpus._replace(given=given, unseen={part: values[::-1] for part, values in corpus.unseen.items()})
    for number, each in enumerate((corpus, other)):
        run = experiment.methods()[method]
        result = run(experiment.effort, lambda each=each: each, 0, tmp_path / str(number))
        _, logs = seen[-1]
        np.testing.assert_allclose(np.exp(logs).sum(axis=1), 1.0, rtol=1e-4)
        tops = [[corpus.vocabulary.index(word) for word in words.split()] for words in result["words"]]
        coherence = topics.npmi(np.array(tops), topics.occurrences(corpus.pooled(), 40))
        np.testing.assert_allclose(result["npmi"], coherence, atol=1e-4)
        if method == ("published", "SFVI"):
            tokens = corpus.pooled()["counts"].sum()
            assert 0.5 < -result["elbo at the end"] / (tokens * np.log(40)) < 2.0
    np.testing.assert_array_equal(seen[0][1], seen[1][1])


def run(tmp_path, *only):
    (tmp_path / "topics").mkdir(exist_ok=True)
    (tmp_path / "topics" / "spec.toml").write_text(TINY)
    for part in only:
        report = reproduce(tmp_path, EXPERIMENTS, "topics", preset="tiny", only=part, say=lambda line: None)
    assert (tmp_path / "topics" / "tiny.png").stat().st_size > 5_000
    return report


def test_some_methods_in_miniature(posts, tmp_path, float32):
    report = run(tmp_path, "vocabulary", "nothing", "NMF", "LDA / gensim", "published / SFVI-Avg")
    for row in (
        "nothing learned | random topics",
        "nothing learned | word frequencies",
        "NMF | scikit-learn",
        "LDA | gensim",
        "published | SFVI-Avg",
    ):
        assert f"| {row} |" in report
    assert "| threshold | told, silos at random | in common |" in report
    assert "Topics of published, SFVI-Avg" in report


def test_more_methods_in_miniature(posts, tmp_path, float32):
    report = run(tmp_path, "AVITM / ", "printed / Sites")
    for row in ("autoencoder | AVITM", "printed | Sites"):
        assert f"| {row} |" in report


def test_the_way_of_an_elbo_is_thinned():
    steps, elbo = thinned(np.arange(1000.0), 10)
    assert len(steps) == len(elbo) == 200
    assert steps[-1] == 10_000
    assert elbo[0] == 2.0


@pytest.mark.parametrize(
    ("score", "ours", "theirs", "says"),
    [
        (
            "npmi",
            [0.40, 0.41, 0.42],
            [0.30, 0.32, 0.31],
            r"yes \(0.410 and 0.310; difference \+0.100 ± 0.006, 3 seeds\)",
        ),
        ("npmi", [0.30, 0.32, 0.31], [0.40, 0.41, 0.42], "no "),
        ("npmi", [0.30, 0.42, 0.35], [0.33, 0.30, 0.42], "cannot be told"),
        ("npmi", [0.40, 0.44], [0.30, 0.31], "cannot be told"),  # 7.7 standard errors, but of two seeds
        ("npmi", [0.40], [0.30], r"cannot be told \(0.400 and 0.300; difference \+0.100, 1 seed\)"),
        ("npmi", [0.40, 0.41, np.nan], [0.30, 0.31, 0.2], r"yes .*difference \+0.100 ± 0.000, 2 seeds"),
        ("perplexity", [800, 810, 805], [900, 905, 910], r"yes \(805 and 905; difference -100 ± 3, 3 seeds\)"),
    ],
)
def test_a_claim_holds_if_the_difference_on_the_same_documents_is_clear(score, ours, theirs, says):
    claim = Claim(("a", "b"), ("c", "d"), score)
    one, other = ({seed: {score: [value, value]} for seed, value in enumerate(side)} for side in (ours, theirs))
    assert re.search(f"^- a, b .* than c, d: {says}", judged(claim, one, other))
    assert judged(claim, one, {7: {score: [0.1]}}) is None
    assert judged(claim, {0: {score: [0.4], "broke": "in round 3"}}, other) is None
    assert judged(claim, {0: {}}, other) is None


def test_every_claim_is_about_methods_of_the_experiment():
    experiment = read(Path("experiments/topics"), EXPERIMENTS["topics"], "paper")
    assert {method for claim in OF_THE_PAPER + OF_OURS for method in claim[:2]} <= set(experiment.methods())


def test_the_quick_preset_on_a_slice_of_the_posts(tmp_path, newsgroups, float32):
    """All methods on 2,000 posts: topics that a person would call topics, more coherent than LDA's on as many words."""
    (tmp_path / "topics").mkdir()
    shutil.copy("experiments/topics/spec.toml", tmp_path / "topics")
    reproduce(tmp_path, EXPERIMENTS, "topics", preset="quick", say=lambda line: None)
    experiment = read(tmp_path / "topics", EXPERIMENTS["topics"], "quick")
    results = Store(tmp_path / "topics", "quick").results(experiment.cells())
    assert len(results) == len(experiment.cells())
    coherence = {method: np.mean(results[f"{' / '.join(method)} / seed 0"]["npmi"]) for method in experiment.methods()}
    ours = coherence["published", "SFVI"]
    assert ours > 0.18
    assert ours > coherence["LDA", "gensim"]
    assert results["published / SFVI / seed 0"]["diversity"] > 0.6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_words = 40": "num_words = 20"}, "num_words is 20; diversity takes at least 25"),
        ({"topics = 3": "topics = 60"}, "topics is 60; give at least 2, and at most num_words"),
    ],
)
def test_impossible_settings_are_refused_before_any_work(tmp_path, change, says):
    text = TINY
    for old, new in change.items():
        text = text.replace(old, new)
    (tmp_path / "spec.toml").write_text(text)
    with pytest.raises(OptionError, match=says):
        read(tmp_path, EXPERIMENTS["topics"], "tiny")
