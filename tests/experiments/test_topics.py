"""Topics in miniature: invented posts, all methods, a few steps."""

import re
from pathlib import Path

import numpy as np
import pytest

from sfvi.experiments import EXPERIMENTS, reproduce, topics_corpus
from sfvi.experiments.spec import read
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
epochs = 2
passes = 2
"""


@pytest.fixture
def posts(monkeypatch):
    """Words of three subjects, as `words_of_posts` would give them."""
    generator = np.random.default_rng(0)
    subjects = [[f"{letter}{number}" for number in range(14)] for letter in "abc"]
    found = [list(generator.choice(subjects[number % 3], 12)) for number in range(90)]
    topics_corpus.corpus.cache_clear()
    monkeypatch.setattr(topics_corpus, "words_of_posts", lambda num_posts: found[:num_posts])
    yield found
    topics_corpus.corpus.cache_clear()


def test_documents_are_dealt_out_once(posts):
    found = topics_corpus.corpus("posts", 90, 42, 2, 10, 1, 0)
    assert [len(bag["words"]) for bag in found.silos.values()] == [40, 40]
    assert found.in_common == len(found.vocabulary) == 42
    tokens = sum(int(bag["counts"].sum()) for bag in (*found.silos.values(), found.given, found.unseen))
    assert tokens == 90 * 12


def run(tmp_path, *only):
    (tmp_path / "topics").mkdir(exist_ok=True)
    (tmp_path / "topics" / "spec.toml").write_text(TINY)
    for part in only:
        report = reproduce(tmp_path, EXPERIMENTS, "topics", preset="tiny", only=part, say=lambda line: None)
    assert (tmp_path / "topics" / "tiny.png").stat().st_size > 5_000
    return report


def test_some_methods_in_miniature(posts, tmp_path, float32):
    report = run(tmp_path, "NMF", "LDA / gensim", "published / SFVI-Avg")
    for row in ("NMF | scikit-learn", "LDA | gensim", "published | SFVI-Avg"):
        assert f"| {row} |" in report
    assert "40 or more of 40" in report
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
