"""Table 1 in miniature, and its scores."""

import dataclasses

import numpy as np
import pytest

from sfvi.experiments import EXPERIMENTS, reproduce, spec
from sfvi.experiments.hier_bnn import HierBnnExperiment
from sfvi.experiments.hier_bnn_methods import Split, evaluate, majority, partition
from sfvi.experiments.hier_bnn_settings import Few

from .test_multinomial import pytestmark  # noqa: F401

TINY = """
[presets.tiny]
dataset = "mnist"
seeds = [0]
splits = [{ silos = 2, batch = 20, local_steps = 5, train_rows = 60, test_rows = 40 }]
share = 0.9
rounds = 2
many = { steps = 5, step_size = 0.01, init_scale = 0.02 }
few = { step_size = 0.002, init_scale = 0.05, refit_steps = 2 }
cold = { step_size = 0.002, init_scale = 0.05, refit_steps = 2, power = 10.0 }
p_fed_bayes = { step_size = 0.005, zeta = 1.0 }
fed_soul = { step_size = 0.02, gamma = 1e-4 }
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hier_bnn").mkdir()
    (tmp_path / "hier_bnn" / "spec.toml").write_text(TINY)
    return tmp_path


def rows_of(folder, only=""):
    report = reproduce(folder, EXPERIMENTS, "hier_bnn", preset="tiny", only=only, say=lambda line: None)
    assert (folder / "hier_bnn" / "tiny.png").stat().st_size > 5_000
    assert "diverged" not in report
    return [line for line in report.splitlines() if line.startswith("| 2 |")]


def test_some_methods_in_miniature(folder, float32):
    for number, only in enumerate(("FedPop / SFVI-Avg", "KL weight 0.1", "pFedBayes / fair", "majority"), start=1):
        assert len(rows_of(folder, only)) == number


def test_all_methods_in_miniature(folder, float32):
    rows = rows_of(folder)
    assert len(rows) == 16
    assert sum("| SFVI |" in row for row in rows) == 2


def test_silos_that_were_never_drawn_are_told(folder):
    """They make the spread of FedSOUL as reported."""
    experiment = spec.read(folder / "hier_bnn", HierBnnExperiment, "tiny")
    experiment = dataclasses.replace(experiment, splits=(Split(50, 10, 1),))
    run = {"accuracies": [0.1, *[0.9, 1.0] * 24, 0.95], "never visited": 1, "log score": -1, "rounds": 20}
    run |= {"ECE": 0.1, "off-majority": 0.5}
    report = experiment.report({"J = 50 / FedPop / FedSOUL, reported / seed 0": run})
    assert "1 of 50 were never drawn in 20 rounds (1.2% to be expected)" in report
    assert "the accuracy is 95.00 (4.95)" in report
    assert "never drawn" not in experiment.report({})


def test_the_papers_split():
    """Feasible sizes, the same for training and test, 90% of one digit."""
    for silos, train_rows, test_rows in ((10, 5421, 892), (50, 1084, 178)):
        train, test = partition("mnist", Split(silos, 100, 1), 0.9, 3)
        assert {len(data["y"]) for data in train.values()} == {train_rows}
        assert {len(data["y"]) for data in test.values()} == {test_rows}
        for number in (0, silos - 1):
            for part in (train, test):
                shares = np.bincount(part[f"silo-{number:0{len(str(silos - 1))}d}"]["y"], minlength=10)
                assert shares.argmax() == number % 10
                assert abs(shares.max() / shares.sum() - 0.9) < 0.01


def test_scores_of_rules_that_are_known():
    """The majority rule is right nine times in ten and never off the majority; who knows all is always right."""
    load = lambda: partition("mnist", Split(10, 100, 1, 500, 300), 0.9, 0)  # noqa: E731
    rule = majority(load, None, 0, None)
    assert abs(rule["accuracy"] - 0.9) < 0.02
    assert rule["off-majority"] == 0
    train, test = load()
    answers = {data["x"].tobytes(): np.eye(10)[data["y"]] for data in test.values()}
    known = evaluate(lambda silo, x: answers[x.tobytes()], train, test)
    assert known["accuracy"] == known["off-majority"] == 1
    assert known["accuracies"] == [1.0] * 10

    def cautious(silo, x):  # sees the digit, but expects its silo's own one more than that
        found = (0.1 + answers[x.tobytes()]) * np.bincount(train[silo]["y"], minlength=10)
        return found / found.sum(1, keepdims=True)

    expects = evaluate(cautious, train, test)
    assert expects["off-majority"] == 0
    assert expects["off-majority, even"] == 1
    assert expects["confidence"] < 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seeds": ()}, "seeds are"),
        ({"cold": Few(0.01, 0.05, 2)}, "cold has the power 1"),
        ({"splits": ()}, "each with another number of silos"),
        ({"splits": (Split(2, 10, 1), Split(2, 20, 1))}, "each with another number of silos"),
    ],
)
def test_bad_settings(folder, change, match):
    experiment = spec.read(folder / "hier_bnn", HierBnnExperiment, "tiny")
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(experiment, **change)


def test_what_rivals_send_is_in_the_table(folder):
    """Of 784-64-10 without biases, in MB: weights, to a silo and back, four bytes each."""
    experiment = dataclasses.replace(
        spec.read(folder / "hier_bnn", HierBnnExperiment, "tiny"), splits=(Split(50, 10, 1),), rounds=20
    )
    run = {"accuracies": [0.9], "log score": -1, "rounds": 20, "ECE": 0.1, "off-majority": 0.5, "never visited": 0}
    names = [("network", "FedAvg"), ("pFedBayes", "fair"), ("FedPop", "FedSOUL, fair"), ("FedPop", "FedSOUL, reported")]
    report = experiment.report({f"J = 50 / {model} / {inference} / seed 0": run for model, inference in names})
    weights, wide = 784 * 64 + 64 * 10, 785 * 512 + 513 * 256 + 257 * 64
    bytes_of = {"FedAvg": 20 * 8 * weights, "| fair": 20 * 16 * weights, "FedSOUL, fair": 160 * (784 * 64 + 2 * 640)}
    bytes_of["FedSOUL, reported"] = 4 * 8 * 3 * wide  # drawn in a fifth of the rounds; moments of Adam go along
    for row, sent in bytes_of.items():
        line = next(line for line in report.splitlines() if row in line)
        assert line.endswith(f" {sent / 1e6:.1f} |")
