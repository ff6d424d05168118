"""Bayesian networks over silos that differ very much (Table 1 of the paper)."""

import dataclasses
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from numpyro.infer import init_to_uniform

from .. import data as datasets
from .. import families, scores
from ..algorithms import SFVI, AlgorithmOptions, SFVIAvg, Sites
from ..baselines import FedSoul, PFedBayes, ReportedFedSoul, fed_avg, fed_soul, p_fed_bayes
from ..baselines.networks import init_layers, log_likelihood, logits
from ..errors import OptionError
from ..model import StructuredModel
from ..zoo import fed_pop, hierarchical_bnn
from .base import Cell, Result, Results, attempt, markdown, name
from .spec import check_seeds

WIDTH, NUM_CLASSES, NUM_DRAWS = 64, 10, 100
RADIUS = 0.1  # where weights start
POOLED_BATCH = 1000
LOWEST = 86  # per cent, in the picture
BNN, POP = "hierarchical BNN", "fully-Bayesian FedPop"
PAPER = {  # test accuracies and spreads of the paper's Table 1
    (10, BNN, "SFVI"): "97.5 (0.50)",
    (10, BNN, "SFVI-Avg"): "96.6 (0.68)",
    (10, POP, "SFVI"): "97.5 (0.46)",
    (10, POP, "SFVI-Avg"): "97.0 (0.62)",
    (10, "FedPop", "FedSOUL, reported"): "97.3 (1.41)",
    (10, "pFedBayes", "reported"): "94.1 (2.20)",
    (50, BNN, "SFVI"): "96.0 (1.03)",
    (50, BNN, "SFVI-Avg"): "93.6 (1.68)",
    (50, POP, "SFVI"): "96.2 (1.05)",
    (50, POP, "SFVI-Avg"): "94.2 (1.33)",
    (50, "FedPop", "FedSOUL, reported"): "95.4 (8.57)",
    (50, "pFedBayes", "reported"): "97.1 (1.18)",
}
Method = tuple[str, str]  # model and inference
Predict = Callable[[str, np.ndarray], np.ndarray]  # probabilities of a silo's network
Silos = dict[str, dict[str, np.ndarray]]


class Split(NamedTuple):
    """A number of silos, and what depends on it.

    Attributes:
        silos: How many.
        batch: Rows of each in a step.
        local_steps: Of the methods with few rounds, in each round.
        train_rows: At most so many of each to train with; None for all.
        test_rows: To test with.
    """

    silos: int
    batch: int
    local_steps: int
    train_rows: int | None = None
    test_rows: int | None = None


@dataclasses.dataclass(frozen=True)
class HierBnnExperiment:
    """Settings.

    Attributes:
        dataset: Whose images.
        seeds: Of the partitions, and of the methods.
        splits: Numbers of silos, and rows in a step.
        share: Of a silo's own label among its rows.
        steps: Of SFVI, and of fits of single silos and of all data.
        step_size: Of Adam there; it falls to zero.
        init_scale: How wide weights start there.
        rounds: Of the methods with few rounds.
        local_step_size: Of Adam there.
        local_init_scale: How wide weights start there.
        refit_steps: Of the silos after the last round.
    """

    dataset: Literal["mnist", "fashion_mnist"]
    seeds: tuple[int, ...]
    splits: tuple[Split, ...]
    share: float
    steps: int
    step_size: float
    init_scale: float
    rounds: int
    local_step_size: float
    local_init_scale: float
    refit_steps: int

    def __post_init__(self):
        check_seeds("hier_bnn", self.seeds)
        if not self.splits or len({split.silos for split in self.splits}) < len(self.splits):
            raise OptionError("hier_bnn: give at least one split, each with another number of silos.")

    def rivals(self, split: Split) -> dict[str, FedSoul | ReportedFedSoul | PFedBayes]:
        """Settings of the methods that we compare with."""
        rounds, steps = self.rounds, split.local_steps
        return {
            "FedSOUL, reported": ReportedFedSoul(),
            "FedSOUL, fair": FedSoul(num_rounds=rounds, num_local_steps=steps, batch_size=split.batch),
            "reported": PFedBayes.reported(),
            "fair": PFedBayes.fair(num_rounds=rounds, num_local_updates=steps, batch_size=split.batch),
        }

    def methods(self, split: Split) -> dict[Method, Callable[..., Result]]:
        """Each fills a cell for a seed."""
        rounds, steps = self.rounds, split.local_steps
        random: Any = init_to_uniform
        common: dict[str, Any] = {
            "global_family": families.mean_field(),
            "local_family": families.block(coupling="none"),
            "init_loc_fn": partial(random, radius=RADIUS),
        }
        many = optax.adam(optax.cosine_decay_schedule(self.step_size, self.steps))
        few = optax.adam(self.local_step_size)
        sfvi = SFVI(optimizer=many, init_scale=self.init_scale, **common)
        common |= {"optimizer": few, "init_scale": self.local_init_scale, "refit_steps": self.refit_steps}
        average, sites = (each(num_local_steps=steps, **common) for each in (SFVIAvg, Sites))
        found: dict[Method, Callable[..., Result]] = {}
        for title, make in ((BNN, hierarchical_bnn), (POP, fed_pop)):
            found[title, "SFVI"] = partial(federated, make, sfvi, self.steps)
            found[title, "SFVI-Avg"] = partial(federated, make, average, rounds)
            found[title, "Sites"] = partial(federated, make, sites, rounds)
        for inference, settings in self.rivals(split).items():
            if isinstance(settings, PFedBayes):
                found["pFedBayes", inference] = partial(personalized, settings)
            else:
                found["FedPop", inference] = partial(langevin, settings)
        found["network", "FedAvg"] = partial(averaged, self.local_step_size, rounds)
        found[BNN, "each silo alone"] = partial(alone, sfvi, self.steps)
        found[BNN, "pooled"] = partial(pooled, sfvi, self.steps)
        found["", "majority"] = majority
        return found

    def cells(self) -> list[Cell]:
        """Partition by partition, so that a whole table is there early."""
        common = {"radius": RADIUS, "width": WIDTH, "draws": NUM_DRAWS}
        ours = {"steps": self.steps, "step size": self.step_size, "init scale": self.init_scale, **common}
        few = {"rounds": self.rounds, "step size": self.local_step_size, **common}
        averaged_sites = {**few, "init scale": self.local_init_scale, "refit": self.refit_steps}
        settings: dict[str, dict] = {
            "SFVI": ours,
            "each silo alone": ours,
            "pooled": {**ours, "pooled batch": POOLED_BATCH},
            "SFVI-Avg": averaged_sites,
            "Sites": averaged_sites,
            "FedAvg": few,
        }
        found = []
        for seed in self.seeds:
            for split in self.splits:
                load = partial(partition, self.dataset, split, self.share, seed)
                for (model, inference), run in self.methods(split).items():
                    cell = name(f"J = {split.silos}", model, inference, f"seed {seed}")
                    known = {"dataset": self.dataset, "share": self.share, **split._asdict()}
                    known |= settings.get(inference, {})
                    if inference in self.rivals(split):
                        known |= dataclasses.asdict(self.rivals(split)[inference])
                    found.append(Cell(cell, known, partial(run, load, split, seed)))
        return found

    def report(self, results: Results) -> str:
        """The paper's table with its own figures beside."""
        columns = ["silos", "model", "inference", "accuracy, % (sd)", "paper", "log score", "ECE, %", "off-majority, %"]
        columns += ["rounds", "MB a silo"]
        rows = []
        for split in self.splits:
            for model, inference in self.methods(split):
                runs = self._runs(results, split, model, inference)
                if not runs:
                    continue
                each = 100 * np.concatenate([run["accuracies"] for run in runs])
                shown = [f"{each.mean():.2f} ({each.std():.2f})", PAPER.get((split.silos, model, inference), "")]
                for score, unit, digits in (("log score", 1, 4), ("ECE", 100, 2), ("off-majority", 100, 1)):
                    shown.append(f"{unit * np.mean([run[score] for run in runs]):.{digits}f}")
                sent = f"{np.mean([run['bytes'] for run in runs]) / 1e6:,.1f}" if "bytes" in runs[0] else ""
                broke = sum("broke" in run for run in runs)
                done = f"{broke} of {len(runs)} diverged" if broke else f"{runs[0]['rounds']:,}"
                rows.append([str(split.silos), model, inference, *shown, done, sent])
        counts = {len(self._runs(results, split, *method)) for split in self.splits for method in self.methods(split)}
        note = f"Partitions: {min(counts)} to {max(counts)}" if len(counts) > 1 else f"Partitions: {max(counts)}"
        return f"{note}. The sd is over silos and partitions.\n\n" + markdown(columns, rows, names=3)

    def draw(self, results: Results, path: Path) -> None:
        """Accuracy in every silo, by method."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(
            1, len(self.splits), figsize=(6.5 * len(self.splits), 5), layout="constrained", squeeze=False
        )
        methods = [method for method in self.methods(self.splits[0]) if method[1] != "majority"]
        for axis, split in zip(axes[0], self.splits, strict=True):
            for position, (model, inference) in enumerate(reversed(methods)):
                for run in self._runs(results, split, model, inference):
                    values = np.maximum(100 * np.array(run["accuracies"]), LOWEST)
                    axis.plot(values, [position] * len(values), "o", color="tab:gray", markersize=2.5, alpha=0.4)
                    axis.plot(values.mean(), position, "|", color="tab:red", markersize=14)
            labels = [f"{model}, {inference}" for model, inference in reversed(methods)]
            axis.set_yticks(range(len(labels)), labels, fontsize=8)
            axis.set_xlim(LOWEST - 0.5, 100)
            axis.set_title(f"{split.silos} silos", fontsize=10)
            axis.set_xlabel(f"test accuracy of a silo, % (lower ones at {LOWEST})")
            axis.grid(axis="x", linewidth=0.4)
        figure.savefig(path, dpi=110)
        plt.close(figure)

    def _runs(self, results, split, model, inference):
        cells = [name(f"J = {split.silos}", model, inference, f"seed {seed}") for seed in self.seeds]
        return [results[cell] for cell in cells if cell in results]


@cache
def images(dataset: str) -> datasets.Images:
    """All images."""
    return getattr(datasets, dataset)()


def partition(dataset: str, split: Split, share: float, seed: int) -> tuple[Silos, Silos]:
    """Training and test images of each silo, split alike, pixels from 0 to 1."""
    found = images(dataset)
    train, test = (
        _silos(x, y, split.silos, share, rows, seed)
        for x, y, rows in (
            (found.train_x, found.train_y, split.train_rows),
            (found.test_x, found.test_y, split.test_rows),
        )
    )
    return train, test


def _silos(x, y, num_silos, share, most, seed):
    positions = datasets.by_label(y, num_silos, share=share, seed=seed)
    if most:
        generator = np.random.default_rng(seed)
        positions = {silo: np.sort(generator.permutation(rows)[:most]) for silo, rows in positions.items()}
    flat = {"x": x.reshape(len(x), -1).astype(np.float32) / 255, "y": y}
    return datasets.take(flat, positions)


def evaluate(predict: Predict, train: Silos, test: Silos) -> Result:
    """Scores of each silo's network on its own test images; all but the accuracies are of all images together.

    Off the majority is what a rule that always says a silo's most frequent label gets wrong.
    """
    accuracies, probabilities, labels, rare = [], [], [], []
    for silo, data in test.items():
        found = predict(silo, data["x"])
        accuracies.append(scores.accuracy(found, data["y"]))
        probabilities.append(found)
        labels.append(data["y"])
        rare.append(data["y"] != np.bincount(train[silo]["y"]).argmax())
    every, truth, off = np.concatenate(probabilities), np.concatenate(labels), np.concatenate(rare)
    return {
        **scores.classification(every, truth),
        "accuracies": np.round(accuracies, 5).tolist(),
        "off-majority": scores.accuracy(every[off], truth[off]) if off.any() else float("nan"),
    }


def federated(make: Callable, algorithm: AlgorithmOptions, rounds: int, load, split: Split, seed: int, state: Path):
    """One of our methods."""
    train, test = load()
    begin = time.perf_counter()
    model = make(batch_size=split.batch)
    found, broke = attempt(model, train, key=seed, num_rounds=rounds, algorithm=algorithm, checkpoint=state)
    seconds = time.perf_counter() - begin

    def predict(silo, x):
        return _probabilities(found, silo, x)

    sent = {column: found.communication[column].to_numpy() for column in found.communication}
    traffic = int(np.sum(sent["rounds"] * (sent["bytes to a silo"] + sent["bytes from a silo"])))
    extra = {"rounds": rounds, "bytes": traffic, "seconds": round(seconds, 1)}
    return evaluate(predict, train, test) | extra | broke


def alone(algorithm: AlgorithmOptions, steps: int, load, split: Split, seed: int, state: Path) -> Result:
    """Every silo by itself: nothing is shared, so that one run fits them all."""
    train, test = load()
    whole = hierarchical_bnn(batch_size=split.batch)
    program: Any = whole.silo_program

    def silo(nothing, data):
        del nothing
        program(whole.population.program(), data)

    model = StructuredModel(lambda: None, silo)
    begin = time.perf_counter()
    found, broke = attempt(model, train, key=seed, num_rounds=steps, algorithm=algorithm, checkpoint=state)
    seconds = time.perf_counter() - begin
    scored = evaluate(partial(_probabilities, found), train, test)
    return scored | {"rounds": 0, "seconds": round(seconds, 1)} | broke


def pooled(algorithm: AlgorithmOptions, steps: int, load, split: Split, seed: int, state: Path) -> Result:
    """One network for all rows together."""
    train, test = load()
    rows = {part: np.concatenate([silo[part] for silo in train.values()]) for part in ("x", "y")}
    model = hierarchical_bnn(batch_size=min(len(rows["y"]), POOLED_BATCH))
    begin = time.perf_counter()
    found, broke = attempt(model, {"all": rows}, key=seed, num_rounds=steps, algorithm=algorithm, checkpoint=state)
    seconds = time.perf_counter() - begin
    scored = evaluate(lambda silo, x: _probabilities(found, "all", x), train, test)
    return scored | {"rounds": 0, "seconds": round(seconds, 1)} | broke


def langevin(settings: FedSoul | ReportedFedSoul, load, split: Split, seed: int, state: Path) -> Result:
    """FedSOUL."""
    del split, state  # it takes minutes
    train, test = load()
    begin = time.perf_counter()
    found = fed_soul(train, settings, key=seed, num_classes=NUM_CLASSES)
    visits = {"never visited": sum(count == 0 for count in found.visits.values())}
    scored = evaluate(found.predict, train, test) | visits
    return scored | {"rounds": settings.num_rounds, "seconds": round(time.perf_counter() - begin, 1)}


def personalized(settings: PFedBayes, load, split: Split, seed: int, state: Path) -> Result:
    """The method pFedBayes."""
    del split, state  # it takes minutes
    train, test = load()
    begin = time.perf_counter()
    found = p_fed_bayes(train, settings, key=seed, num_classes=NUM_CLASSES)
    scored = evaluate(partial(found.predict, num_samples=NUM_DRAWS), train, test)
    return scored | {"rounds": settings.num_rounds, "seconds": round(time.perf_counter() - begin, 1)}


def averaged(step_size: float, rounds: int, load, split: Split, seed: int, state: Path) -> Result:
    """FedAvg of one network for all."""
    del state  # it takes minutes
    train, test = load()
    begin = time.perf_counter()

    def loss(layers, batch):
        return -log_likelihood(logits(layers, batch["x"]), batch["y"]) / len(batch["y"])

    features = next(iter(train.values()))["x"].shape[1]
    start = init_layers(jax.random.key(seed), [features, WIDTH, NUM_CLASSES], biases=False)
    options: dict[str, Any] = {"num_rounds": rounds, "num_local_steps": split.local_steps, "batch_size": split.batch}
    found = fed_avg(loss, start, train, key=seed, optimizer=optax.adam(step_size), **options)
    predict = jax.jit(lambda x: jax.nn.softmax(logits(found, x)))
    scored = evaluate(lambda silo, x: np.asarray(predict(x)), train, test)
    return scored | {"rounds": rounds, "seconds": round(time.perf_counter() - begin, 1)}


def majority(load, split: Split, seed: int, state: Path) -> Result:
    """Frequencies of the labels in each silo."""
    del split, seed, state
    train, test = load()

    def predict(silo, x):
        counts = np.bincount(train[silo]["y"], minlength=NUM_CLASSES)
        return np.tile(counts / counts.sum(), (len(x), 1))

    return evaluate(predict, train, test) | {"rounds": 0, "seconds": 0.0}


def _probabilities(found, silo, x):
    data = {"x": x, "y": np.zeros(len(x), np.int32)}
    return found.silo(silo).predict(data, sites=["probabilities"], num_samples=NUM_DRAWS)["probabilities"]
