"""MNIST in miniature: a few images, a few steps, all methods."""

import os

import numpy as np
import pytest

from sfvi.data import images, store
from sfvi.experiments import EXPERIMENTS, reproduce
from sfvi.experiments.fast_start import FastStartExperiment
from sfvi.experiments.multinomial import Split, predict, silos_of
from sfvi.experiments.spec import Rounds

there = os.environ.get(store.VARIABLE) or all((store.cache_folder("mnist") / name).is_file() for name in images.FILES)
pytestmark = pytest.mark.skipif(not there, reason="MNIST is neither in SFVI_DATA nor downloaded")
TINY = """
[presets.tiny]
seeds = [0]
splits = [{ silos = 2, rows = 40, batch = 20 }]
steps = 20
independent_steps = 20
local_steps = 10
step_size = 0.01
variant_rounds = 2
variant_steps = 5
variants = [{ name = "no factor", factor = false }, { name = "by units", sizes = "unequal", weights = "units" }]
"""
FAST = """
[presets.tiny]
seeds = [0]
split = { silos = 2, rows = 40, batch = 40 }
rounds = 200
step_size = 0.01
start = { rounds = 2, steps = 20 }
"""


def run(tmp_path, name, content, only=""):
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "spec.toml").write_text(content)
    return reproduce(tmp_path, EXPERIMENTS, name, preset="tiny", only=only, say=lambda line: None)


def test_some_methods_in_miniature(tmp_path, float32):
    """One that shares and one that does not, and a choice that the paper leaves open; each adds to the table."""
    for only in ("Independent", "SFVI-Avg, one round", "no factor"):
        report = run(tmp_path, "multinomial", TINY, only)
    for row in ("Independent", "SFVI-Avg, one round"):
        assert f"| 2 of 40 | {row} |" in report
    assert "| FedAvg |" not in report
    assert "| no factor |" in report
    assert (tmp_path / "multinomial" / "tiny.png").stat().st_size > 5_000


def test_all_methods_in_miniature(tmp_path, float32):
    report = run(tmp_path, "multinomial", TINY)
    for row in ("Independent", "SFVI-Avg, one round", "SFVI-Avg", "SFVI", "Sites", "FedAvg"):
        assert f"| 2 of 40 | {row} |" in report
    assert "| no factor |" in report
    assert "| by units |" in report
    assert (tmp_path / "multinomial" / "tiny.png").stat().st_size > 5_000


def test_a_fast_start_in_miniature(tmp_path, float32):
    report = run(tmp_path, "fast_start", FAST)
    assert "ratio of rounds" in report
    assert (tmp_path / "fast_start" / "tiny.png").stat().st_size > 5_000


def test_silos_are_drawn_once_and_have_their_sizes():
    split = Split(25, 200, 200)
    equal, unequal = silos_of(split, 0), silos_of(split, 0, "unequal")
    assert {len(silo["y"]) for silo in equal.values()} == {200}
    assert sorted({len(silo["y"]) for silo in unequal.values()}) == [40, 200, 360]
    rows = [np.concatenate([silo["x"] for silo in silos.values()]) for silos in (equal, unequal)]
    assert all(len(found) == 5000 for found in rows)
    assert np.array_equal(*(np.sort(found.sum(1)) for found in rows))
    assert not np.array_equal(equal["silo-00"]["x"], silos_of(split, 1)["silo-00"]["x"])


def test_predictions_are_means_over_draws():
    generator = np.random.default_rng(0)
    draws = {"W": generator.normal(size=(3, 10, 4)), "b": generator.normal(size=(3, 10))}
    x = generator.normal(size=(5, 4))
    logits = np.einsum("nk,sck->snc", x, draws["W"]) + draws["b"][:, None]
    odds = np.exp(logits)
    np.testing.assert_allclose(predict(draws, x), (odds / odds.sum(2, keepdims=True)).mean(0), rtol=1e-10)


def elbos(slow, quick):
    return {"from scratch / seed 0": {"elbo": slow}, "fast start / seed 0": {"elbo": quick}}


def test_a_fast_start_is_compared_at_levels_that_scratch_reaches():
    """Ten windows of 20 rounds, the last of them at -10."""
    split, start = Split(2, 40, 40), Rounds(2, 20)
    experiment = FastStartExperiment(seeds=(0,), split=split, rounds=200, step_size=0.1, start=start)
    slow = list(range(-100, 0, 10))
    results = elbos(slow, slow[5:] * 2)
    assert experiment.compare(90, results, 0) == (20, 2 + 20)
    assert experiment.compare(45, results, 0) == (120, 2 + 20)
    early = [-100, -11, *slow[2:]]  # one lucky estimate
    assert experiment.compare(5, elbos(slow, early), 0) == (200, 2 + 200)
    assert "not reached" in experiment.report(elbos(slow, [-2000] * 10))
