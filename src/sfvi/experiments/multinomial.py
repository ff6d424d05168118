"""Multinomial regression of MNIST over many small and few large silos (supplement, Table S1)."""

import dataclasses
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax

from .. import scores
from ..algorithms import SFVI, AlgorithmOptions, SFVIAvg, Sites
from ..algorithms.sfvi_avg import Weights
from ..baselines import fed_avg
from ..data import by_size, equally, mnist, take
from ..errors import OptionError
from ..fitting import fit
from ..model import StructuredModel
from ..results import Fit
from ..zoo import multinomial_regression
from .base import Cell, Result, Results, attempt, markdown, name
from .spec import check_seeds

NUM_DRAWS = 100  # of the posterior, for predictions
NUM_IMAGES = 60_000  # to train with
PAPER = {  # test accuracies of the paper's Table S1
    (25, "Independent"): 51.5,
    (25, "SFVI-Avg, one round"): 63.9,
    (25, "SFVI-Avg"): 69.3,
    (25, "SFVI"): 84.0,
    (5, "Independent"): 86.8,
    (5, "SFVI-Avg, one round"): 90.4,
    (5, "SFVI-Avg"): 90.2,
    (5, "SFVI"): 90.8,
}


class Split(NamedTuple):
    """Silos of equal size; `batch` rows of each in a step."""

    silos: int
    rows: int
    batch: int


class Variant(NamedTuple):
    r"""A choice that the paper leaves open, against the usual ones.

    Attributes:
        name: Of the choice.
        method: SFVI-Avg or SFVI.
        step_size: Of Adam at the start.
        factor: Whether silos take themselves for N / N_j copies.
        weights: Of the barycenter.
        sizes: "equal", or "unequal" for silos of which half have a ninth of the others' rows.
        scales: $\sigma_W = \sigma_b$ if they are not learned.
    """

    name: str
    method: Literal["SFVI-Avg", "SFVI"] = "SFVI-Avg"
    step_size: float = 0.01
    factor: bool = True
    weights: Weights = "uniform"
    sizes: Literal["equal", "unequal"] = "equal"
    scales: float | None = None


@dataclasses.dataclass(frozen=True)
class MultinomialExperiment:
    """Settings.

    Attributes:
        seeds: Of the choice of images, and of the methods.
        splits: Number of silos, rows of each, and rows in a batch.
        steps: Of every method, in all: SFVI's rounds, or rounds times local steps.
        independent_steps: Of silos that go alone, which have little to learn.
        local_steps: Of SFVI-Avg, Sites and FedAvg in a round.
        step_size: Of Adam at the start; it falls to zero.
        variants: Choices that the paper leaves open, on the first split and seed, each with a name.
        variant_rounds: Of the variants of SFVI-Avg.
        variant_steps: In each of them.
    """

    seeds: tuple[int, ...]
    splits: tuple[Split, ...]
    steps: int
    independent_steps: int
    local_steps: int
    step_size: float
    variants: tuple[Variant, ...]
    variant_rounds: int
    variant_steps: int

    def __post_init__(self):
        check_seeds("multinomial", self.seeds)
        if not self.splits or len({split.silos for split in self.splits}) < len(self.splits):
            raise OptionError("multinomial: give at least one split, each with another number of silos.")
        for split in self.splits:
            if split.silos * split.rows > NUM_IMAGES:
                raise OptionError(
                    f"multinomial: {split.silos} silos of {split.rows} are more than {NUM_IMAGES:,} images."
                )
        if self.steps % self.local_steps:
            raise OptionError(f"multinomial: {self.steps} steps are no whole rounds of {self.local_steps}.")
        if len({variant.name for variant in self.variants}) < len(self.variants):
            raise OptionError("multinomial: two variants have the same name.")
        for variant in self.variants:
            if not variant.factor and (variant.method == "SFVI" or variant.sizes == "unequal"):
                raise OptionError(f"multinomial, {variant.name}: factor = false is for SFVI-Avg over equal silos.")

    def methods(self) -> dict[str, Callable[[Split, int, Path], Result]]:
        """Each fills a cell for a split and a seed."""
        rounds, schedule = self.steps // self.local_steps, optax.cosine_decay_schedule(self.step_size, self.steps)
        adam = optax.adam(schedule)
        alone = optax.adam(optax.cosine_decay_schedule(self.step_size, self.independent_steps))
        once = SFVIAvg(num_local_steps=self.steps, optimizer=adam)
        average = SFVIAvg(num_local_steps=self.local_steps, optimizer=adam)
        sites = Sites(num_local_steps=self.local_steps)
        return {
            "Independent": partial(independent, SFVI(optimizer=alone), self.independent_steps),
            "SFVI-Avg, one round": partial(federated, once, 1),
            "SFVI-Avg": partial(federated, average, rounds),
            "SFVI": partial(federated, SFVI(optimizer=adam), self.steps),
            "Sites": partial(federated, sites, rounds),
            "FedAvg": partial(point_estimate, self.step_size, rounds, self.local_steps),
        }

    def cells(self) -> list[Cell]:
        """Seed by seed, so that a part of the table is there early; then the open choices."""
        common = {"steps": self.steps, "local steps": self.local_steps, "step size": self.step_size}
        alone = {"steps": self.independent_steps, "step size": self.step_size}
        found = []
        for seed in self.seeds:
            for split in self.splits:
                for method, run in self.methods().items():
                    cell = name(f"J = {split.silos}", method, f"seed {seed}")
                    settings = alone if method == "Independent" else common
                    found.append(Cell(cell, {**settings, **split._asdict()}, partial(run, split, seed)))
        seed = self.seeds[0]
        first = self.splits[0]
        for variant in self.variants:
            settings = {**variant._asdict(), "rounds": self.variant_rounds, "steps": self.variant_steps}
            settings |= {"silos": first.silos, "silo rows": first.rows, "batch": first.batch}
            run = partial(open_choice, variant, self.variant_rounds, self.variant_steps, first, seed)
            found.append(Cell(name("variant", variant.name, f"seed {seed}"), settings, run))
        return found

    def report(self, results: Results) -> str:
        """The paper's table with its own figures beside, then the open choices."""
        columns = ["silos", "method", "test accuracy, %", "paper", "train accuracy, %", "log score", "ECE, %"]
        columns += ["sigma_W", "sigma_b", "rounds"]
        rows = []
        for split in self.splits:
            for method in self.methods():
                runs = self._runs(results, f"J = {split.silos}", method)
                if runs:
                    paper = PAPER.get((split.silos, method))
                    shown = _shown(runs)
                    silos = f"{split.silos} of {split.rows:,}"
                    rows.append([silos, method, shown[0], f"{paper:.1f}" if paper else "", *shown[1:]])
        tried = {variant.name: self._runs(results, "variant", variant.name) for variant in self.variants}
        choices = [[title, *_shown(runs)] for title, runs in tried.items() if runs]
        note = "Mean ± standard error over seeds, where there are several."
        text = note + "\n\n" + markdown(columns, rows, names=2)
        if choices:
            steps = f"{self.variant_rounds} rounds of {self.variant_steps} steps"
            first = self.splits[0]
            text += f"\nChoices that the paper leaves open, {first.silos} silos of {first.rows}, {steps}, one seed:\n\n"
            text += markdown(["choice", *[column for column in columns[2:] if column != "paper"]], choices)
        return text

    def draw(self, results: Results, path: Path) -> None:
        """Test accuracy of every method, ours and the paper's."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        splits = self.splits
        figure, axes = plt.subplots(
            1, len(splits), figsize=(5.5 * len(splits), 3.4), layout="constrained", squeeze=False
        )
        for axis, split in zip(axes[0], splits, strict=True):
            for position, method in enumerate(reversed(self.methods())):
                runs = self._runs(results, f"J = {split.silos}", method)
                values = [100 * run["accuracy"] for run in runs]
                axis.plot(values, [position] * len(values), "o", color="tab:red", label="ours" * (not position))
                if (paper := PAPER.get((split.silos, method))) is not None:
                    axis.plot([paper], [position], "|", color="black", markersize=14)
            axis.plot([], [], "k|", markersize=10, label="paper")
            axis.set_yticks(range(len(self.methods())), reversed(self.methods()))
            axis.set_title(f"{split.silos} silos of {split.rows:,} images", fontsize=10)
            axis.set_xlabel("test accuracy, %")
            axis.grid(axis="x", linewidth=0.4)
        axes[0][0].legend(frameon=False)
        figure.savefig(path, dpi=110)
        plt.close(figure)

    def _runs(self, results, *parts):
        return [results[n] for seed in self.seeds if (n := name(*parts, f"seed {seed}")) in results]


@cache
def images() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Training and test images, pixels from 0 to 1."""
    found = mnist()
    train, test = (
        {"x": x.reshape(len(x), -1).astype(np.float32) / 255, "y": y}
        for x, y in ((found.train_x, found.train_y), (found.test_x, found.test_y))
    )
    return train, test


def silos_of(split: Split, seed: int, sizes: str = "equal") -> dict[str, Any]:
    """Silos of images drawn at random, all of equal size or half of them a ninth of the others'."""
    train, _ = images()
    total = split.silos * split.rows
    rows = np.random.default_rng(seed).permutation(len(train["y"]))[:total]
    if sizes == "equal":
        positions = equally(total, split.silos, seed=seed)
    else:
        pair = [split.rows // 5, 2 * split.rows - split.rows // 5] * (split.silos // 2)
        positions = by_size(pair + [split.rows] * (split.silos % 2), seed=seed)
    return take({part: values[rows] for part, values in train.items()}, positions)


def model_of(split: Split, **options: Any) -> StructuredModel:
    """The model; without minibatches if a batch is all of a silo."""
    return multinomial_regression(batch_size=None if split.batch >= split.rows else split.batch, **options)


def federated(algorithm: AlgorithmOptions, rounds: int, split: Split, seed: int, state: Path) -> Result:
    """One of our methods."""
    silos = silos_of(split, seed)
    begin = time.perf_counter()
    found, broke = attempt(model_of(split), silos, key=seed, num_rounds=rounds, algorithm=algorithm, checkpoint=state)
    return _result(found, silos, time.perf_counter() - begin) | broke


def independent(algorithm: AlgorithmOptions, steps: int, split: Split, seed: int, state: Path) -> Result:
    """Every silo by itself; scores are means over silos, each on its own training images and all test images."""
    runs = []
    for silo, data in silos_of(split, seed).items():
        begin, file = time.perf_counter(), state.with_name(f"{state.name}.{silo}")
        found = fit(model_of(split), {silo: data}, key=seed, num_rounds=steps, algorithm=algorithm, checkpoint=file)
        runs.append(_result(found, {silo: data}, time.perf_counter() - begin))
    means = {score: float(np.mean([run[score] for run in runs])) for score in runs[0]}
    return means | {"rounds": 0, "seconds": sum(run["seconds"] for run in runs)}


def point_estimate(step_size: float, rounds: int, steps: int, split: Split, seed: int, state: Path) -> Result:
    """FedAvg of the maximum of the likelihood."""
    del state  # it takes a minute or two
    silos, begin = silos_of(split, seed), time.perf_counter()

    def loss(params, batch):
        logits = batch["x"] @ params["W"].T + params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    start = {"W": jnp.zeros((10, 784)), "b": jnp.zeros(10)}
    batch = min(split.batch, 100)
    options = {"num_rounds": rounds, "num_local_steps": steps, "batch_size": batch, "optimizer": optax.adam(step_size)}
    found = fed_avg(loss, start, silos, key=seed, **options)
    seconds = time.perf_counter() - begin
    draws = {part: values[None] for part, values in found.items()}
    return _scores(draws, silos) | {"rounds": rounds, "seconds": round(seconds, 1)}


def open_choice(variant: Variant, rounds: int, steps: int, split: Split, seed: int, state: Path) -> Result:
    """A run with other choices; SFVI gets as many steps."""
    silos = silos_of(split, seed, variant.sizes)
    options = {} if variant.scales is None else {"scales": (variant.scales,) * 2, "learn_scales": False}
    model = model_of(split, **options)
    if not variant.factor:  # undo it inside the silo's program
        model = _scaled(model, 1.0 / split.silos)
    adam = optax.adam(optax.cosine_decay_schedule(variant.step_size, rounds * steps))
    algorithm, number = SFVI(optimizer=adam), rounds * steps
    if variant.method == "SFVI-Avg":
        algorithm, number = SFVIAvg(num_local_steps=steps, weights=variant.weights, optimizer=adam), rounds
    begin = time.perf_counter()
    found, broke = attempt(model, silos, key=seed, num_rounds=number, algorithm=algorithm, checkpoint=state)
    return _result(found, silos, time.perf_counter() - begin) | broke


def _scaled(model, factor):
    silo = model.silo_program

    def scaled(globals_, data):
        with numpyro.handlers.scale(scale=factor):
            silo(globals_, data)

    return StructuredModel(model.population.program, scaled)


def _result(found: Fit, silos, seconds):
    draws = found.posterior.sample(1, NUM_DRAWS)
    scales = {part: float(value) for part, value in found.theta.items()}
    return _scores(draws, silos) | scales | {"rounds": len(found.elbo), "seconds": round(seconds, 1)}


def _scores(draws, silos):
    _, test = images()
    train = {part: np.concatenate([silo[part] for silo in silos.values()]) for part in ("x", "y")}
    found = scores.classification(predict(draws, test["x"]), test["y"])
    return found | {"train accuracy": scores.accuracy(predict(draws, train["x"]), train["y"])}


def predict(draws: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """Posterior predictive probabilities: the mean over draws of each class's."""

    @jax.jit
    def mean(draws, x):
        def add(total, draw):
            return total + jax.nn.softmax(x @ draw["W"].T + draw["b"]), None

        start = jnp.zeros((x.shape[0], draws["b"].shape[1]), x.dtype)
        return jax.lax.scan(add, start, draws)[0] / draws["b"].shape[0]

    return np.asarray(mean({part: draws[part] for part in ("W", "b")}, x))


def _shown(runs):
    """Cells of a row: accuracies and ECE in percent."""
    columns = [("accuracy", 100, 2), ("train accuracy", 100, 2), ("log score", 1, 4), ("ECE", 100, 2)]
    columns += [("sigma_W", 1, 3), ("sigma_b", 1, 3)]
    found, cells = scores.collected(runs), []
    for score, unit, digits in columns:
        mean, error = found.get(score, (np.nan, np.nan))
        spread = "" if np.isnan(error) else f" ± {unit * error:.{digits}f}"
        cells.append("" if np.isnan(mean) else f"{unit * mean:.{digits}f}{spread}")
    rounds = f"{max(run['rounds'] for run in runs):,}"
    broke = [run["broke"] for run in runs if "broke" in run]
    return [*cells, f"{len(broke)} of {len(runs)} diverged" if broke else rounds]
