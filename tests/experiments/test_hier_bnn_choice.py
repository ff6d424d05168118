"""Choosing settings by training images that are held out."""

import numpy as np
import pytest

from sfvi.errors import OptionError
from sfvi.experiments import EXPERIMENTS, reproduce, spec
from sfvi.experiments.hier_bnn_choice import HierBnnChoiceExperiment, kept
from sfvi.experiments.hier_bnn_methods import Split, partition

from .test_multinomial import pytestmark  # noqa: F401

TINY = """
[presets.tiny]
dataset = "mnist"
seeds = [7]
splits = [{ silos = 2, batch = 20, local_steps = 5, train_rows = 60, test_rows = 40 }]
share = 0.9
held_out = 0.25
rounds = 2
many = [
    { steps = 5, step_size = 0.01, init_scale = 0.05 },
    { steps = 5, step_size = 0.02, init_scale = 0.05 },
    { steps = 7, step_size = 0.01, init_scale = 0.05 },
]
few = [{ step_size = 0.003, init_scale = 0.05, refit_steps = 2 }]
p_fed_bayes = [{ step_size = 0.005, zeta = 2.0 }]
fed_soul = [{ step_size = 0.02, gamma = 1e-4 }]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hier_bnn_choice").mkdir()
    (tmp_path / "hier_bnn_choice" / "spec.toml").write_text(TINY)
    return tmp_path


def test_held_out_images_are_training_images_that_are_not_learned_from():
    split = Split(2, 20, 5, 60, 40)
    train, _ = partition("mnist", split, 0.9, 7)
    learned, judged = kept("mnist", split, 0.9, 0.25, 7)
    for silo, rows in train.items():
        assert len(learned[silo]["y"]) == 45
        assert len(judged[silo]["y"]) == 15
        together = np.concatenate([learned[silo]["x"], judged[silo]["x"]])
        assert sorted(map(bytes, together)) == sorted(map(bytes, rows["x"]))


def test_in_miniature(folder, float32):
    report = reproduce(folder, EXPERIMENTS, "hier_bnn_choice", preset="tiny", say=lambda line: None)
    assert (folder / "hier_bnn_choice" / "tiny.png").stat().st_size > 5_000
    assert sum(line.startswith("| SFVI, ") for line in report.splitlines()) == 3
    for method, words in (
        ("SFVI-Avg", "step size 0.003, start width 0.05, refit 2"),
        ("pFedBayes", "step size 0.005, zeta 2"),
        ("FedSOUL", "step size 0.02, gamma 0.0001"),
    ):
        assert f"- {method}: best mean log score with {words} (-" in report


def test_the_best_log_score_of_a_method_wins_once_all_candidates_are_there(folder):
    experiment = spec.read(folder / "hier_bnn_choice", HierBnnChoiceExperiment, "tiny")
    names = [cell.name for cell in experiment.cells()]
    scores = ((0.9, -0.2), (0.8, -0.1), (0.95, -0.05))
    results = {
        name: {"accuracy": first, "confidence": 0.5, "log score": second}
        for name, (first, second) in zip(names[:3], scores, strict=True)
    }
    report = experiment.report(results)
    assert "- SFVI, 5 steps: best mean log score with step size 0.02, start width 0.05 (-0.1000)." in report
    assert "- SFVI, 7 steps: best mean log score with step size 0.01, start width 0.05 (-0.0500)." in report
    assert "- pFedBayes: not all candidates are there yet." in report
    assert "- SFVI, 5 steps: not all" in experiment.report({names[0]: results[names[0]]})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("0.25", "1.5", "held_out between 0 and 1"), ("step_size = 0.02, init", "step_size = 0.01, init", "many has the")],
)
def test_choices_that_are_none_are_refused(folder, old, new, message):
    path = folder / "hier_bnn_choice" / "spec.toml"
    path.write_text(TINY.replace(old, new))
    with pytest.raises(OptionError, match=message):
        spec.read(folder / "hier_bnn_choice", HierBnnChoiceExperiment, "tiny")
