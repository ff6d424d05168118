"""Bayesian networks over silos that differ very much (Table 1 of the paper)."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..algorithms import SFVIAvg, Sites
from ..baselines import FedSoul, PFedBayes, ReportedFedSoul
from ..baselines.networks import num_weights
from ..errors import OptionError
from ..zoo import fed_pop, hierarchical_bnn
from ..zoo.bayesian_networks import RADIUS
from . import hier_bnn_methods as methods
from .base import Cell, Result, Results, markdown, name
from .hier_bnn_methods import NUM_DRAWS, WIDTH, Split
from .hier_bnn_settings import FairFedSoul, FairPFedBayes, Few, Many
from .spec import check_seeds

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
COLUMNS = (  # of the table: scores, what they are multiplied with, digits
    ("log score", 1, 4),
    ("ECE", 100, 2),
    ("confidence", 100, 2),
    ("off-majority", 100, 1),
    ("off-majority, even", 100, 1),
)
INFORMED = "FedAvg, silo's frequencies"
FOR_ALL = ("FedAvg", "pooled", "majority")  # have no network of a silo's own
Method = tuple[str, str]  # model and inference


@dataclasses.dataclass(frozen=True)
class HierBnnExperiment:
    """Settings.

    Attributes:
        dataset: Whose images.
        seeds: Of the partitions, and of the methods.
        splits: Numbers of silos, and rows in a step.
        share: Of a silo's own label among its rows.
        rounds: Of the methods with few rounds.
        many: SFVI, and fits of single silos and of all data.
        few: SFVI-Avg and Sites; FedAvg has their step size.
        cold: SFVI-Avg with a power of the likelihood, to compare with a pFedBayes whose KL term weighs as little.
        p_fed_bayes: The `fair` one.
        fed_soul: The `fair` one.
    """

    dataset: Literal["mnist", "fashion_mnist"]
    seeds: tuple[int, ...]
    splits: tuple[Split, ...]
    share: float
    rounds: int
    many: Many
    few: Few
    cold: Few
    p_fed_bayes: FairPFedBayes
    fed_soul: FairFedSoul

    def __post_init__(self):
        check_seeds("hier_bnn", self.seeds)
        if self.cold.power == 1:
            raise OptionError("hier_bnn: cold has the power 1, which is few; give another.")
        if not self.splits or len({split.silos for split in self.splits}) < len(self.splits):
            raise OptionError("hier_bnn: give at least one split, each with another number of silos.")

    @property
    def cold_title(self) -> str:
        """The model of the row with a power of the likelihood."""
        return f"{POP}{self.cold.title}"

    def rivals(self, split: Split) -> dict[str, FedSoul | ReportedFedSoul | PFedBayes]:
        """Settings of the methods that we compare with."""
        return {
            "FedSOUL, reported": ReportedFedSoul(),
            "FedSOUL, fair": self.fed_soul.rival(self.rounds, split),
            "reported": PFedBayes.reported(),
            "fair": self.p_fed_bayes.rival(self.rounds, split),
        }

    def methods(self, split: Split) -> dict[Method, Callable[..., Result]]:
        """Each fills a cell for a seed."""
        rounds, steps, sfvi = self.rounds, self.many.steps, self.many.algorithm()
        average, sites = (self.few.algorithm(kind, split) for kind in (SFVIAvg, Sites))
        found: dict[Method, Callable[..., Result]] = {}
        for title, make in ((BNN, hierarchical_bnn), (POP, fed_pop)):
            found[title, "SFVI"] = partial(methods.federated, make, sfvi, steps)
            found[title, "SFVI-Avg"] = partial(methods.federated, make, average, rounds)
            found[title, "Sites"] = partial(methods.federated, make, sites, rounds)
        colder = partial(fed_pop, power=self.cold.power)
        found[self.cold_title, "SFVI-Avg"] = partial(
            methods.federated, colder, self.cold.algorithm(SFVIAvg, split), rounds
        )
        for inference, settings in self.rivals(split).items():
            if isinstance(settings, PFedBayes):
                found["pFedBayes", inference] = partial(methods.personalized, settings)
            else:
                found["FedPop", inference] = partial(methods.langevin, settings)
        found["network", "FedAvg"] = partial(methods.averaged, self.few.step_size, rounds)
        found["network", INFORMED] = partial(methods.averaged, self.few.step_size, rounds, informed=True)
        found[BNN, "each silo alone"] = partial(methods.alone, sfvi, steps)
        found[BNN, "pooled"] = partial(methods.pooled, sfvi, steps)
        found["", "majority"] = methods.majority
        return found

    def cells(self) -> list[Cell]:
        """Partition by partition, so that a whole table is there early."""
        common = {"radius": RADIUS, "width": WIDTH, "draws": NUM_DRAWS}
        many = {"steps": self.many.steps, "step size": self.many.step_size}
        ours = {**many, "init scale": self.many.init_scale, **common}
        few = {"rounds": self.rounds, "step size": self.few.step_size, **common}
        averaged_sites = {**few, "init scale": self.few.init_scale, "refit": self.few.refit_steps}
        cold = {"step size": self.cold.step_size, "init scale": self.cold.init_scale, "refit": self.cold.refit_steps}
        settings: dict[str, dict] = {
            "SFVI": ours,
            "each silo alone": ours,
            "pooled": {**ours, "pooled batch": "all silos'"},
            "SFVI-Avg": averaged_sites,
            "Sites": averaged_sites,
            "FedAvg": few,
            INFORMED: few,
            self.cold_title: {**few, **cold, "power": self.cold.power},
        }
        found = []
        for seed in self.seeds:
            for split in self.splits:
                load = partial(methods.partition, self.dataset, split, self.share, seed)
                for (model, inference), run in self.methods(split).items():
                    cell = name(f"J = {split.silos}", model, inference, f"seed {seed}")
                    known = {"dataset": self.dataset, "share": self.share, **split._asdict()}
                    known |= settings.get(model, settings.get(inference, {}))
                    if inference in self.rivals(split):
                        known |= dataclasses.asdict(self.rivals(split)[inference])
                    found.append(Cell(cell, known, partial(run, load, split, seed)))
        return found

    def report(self, results: Results) -> str:
        """The paper's table with its own figures beside."""
        columns = ["silos", "model", "inference", "accuracy, % (sd)", "paper", "log score", "ECE, %", "confidence, %"]
        columns += ["off-majority, %", "even, %", "rounds", "MB a silo"]
        beside = PAPER if self.dataset == "mnist" else {}
        rows = []
        for split in self.splits:
            for model, inference in self.methods(split):
                runs = self._runs(results, split, model, inference)
                if not runs:
                    continue
                each = 100 * np.concatenate([run["accuracies"] for run in runs])
                shown = [f"{each.mean():.2f} ({each.std():.2f})", beside.get((split.silos, model, inference), "")]
                shown += [_shown(runs, *column) for column in COLUMNS[:-1]]
                shown += [_shown(runs, *COLUMNS[-1]) if inference not in FOR_ALL else ""]
                sent = np.mean([run.get("bytes", self._sent(split, inference)) for run in runs]) / 1e6
                broke = sum("broke" in run for run in runs)
                done = f"{broke} of {len(runs)} diverged" if broke else f"{runs[0]['rounds']:,}"
                rows.append([str(split.silos), model, inference, *shown, done, f"{sent:,.1f}" if sent else ""])
        counts = {len(self._runs(results, split, *method)) for split in self.splits for method in self.methods(split)}
        note = "Not finished. " if len(counts) > 1 else ""
        note += f"Partitions: {' to '.join(map(str, sorted({min(counts), max(counts)})))}"
        table = f"{note}. The sd is over silos and partitions.\n\n"
        table += markdown(columns, rows, names=3)
        notes = "".join(self._pairs(results, split) + self._spread(results, split) for split in self.splits)
        return table + (f"\n{notes}" if notes else "")

    def draw(self, results: Results, path: Path) -> None:
        """Accuracy in every silo, by method."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(
            1, len(self.splits), figsize=(6.5 * len(self.splits), 5), layout="constrained", squeeze=False
        )
        shown = [method for method in self.methods(self.splits[0]) if method[1] != "majority"]
        for axis, split in zip(axes[0], self.splits, strict=True):
            for position, (model, inference) in enumerate(reversed(shown)):
                for run in self._runs(results, split, model, inference):
                    values = np.maximum(100 * np.array(run["accuracies"]), LOWEST)
                    axis.plot(values, [position] * len(values), "o", color="tab:gray", markersize=2.5, alpha=0.4)
                    axis.plot(values.mean(), position, "|", color="tab:red", markersize=14)
            labels = [f"{model}, {inference}" for model, inference in reversed(shown)]
            axis.set_yticks(range(len(labels)), labels, fontsize=8)
            axis.set_xlim(LOWEST - 0.5, 100)
            axis.set_title(f"{split.silos} silos", fontsize=10)
            axis.set_xlabel(f"test accuracy of a silo, % (lower ones at {LOWEST})")
            axis.grid(axis="x", linewidth=0.4)
        figure.savefig(path, dpi=110)
        plt.close(figure)

    def _pairs(self, results, split):
        """How SFVI-Avg differs from the strongest rival, partition by partition."""
        lines = ""
        rivals = self._runs(results, split, "pFedBayes", "fair")
        for model in (POP, self.cold_title):
            ours = self._runs(results, split, model, "SFVI-Avg")
            if not len(ours) == len(rivals) > 1:
                continue
            shown = []
            for score, factor, digits in (("accuracy", 100, 2), ("log score", 1, 4), ("off-majority", 100, 1)):
                differences = factor * np.array(
                    [one[score] - other[score] for one, other in zip(ours, rivals, strict=True)]
                )
                error = differences.std(ddof=1) / np.sqrt(len(differences))
                shown.append(f"{score} {differences.mean():+.{digits}f} ± {error:.{digits}f}")
            lines += f"- {split.silos} silos, SFVI-Avg on {model} less pFedBayes, fair: {', '.join(shown)}.\n"
        return lines

    def _spread(self, results, split):
        """Where the spread of FedSOUL comes from: silos that were never drawn, whose heads were never trained."""
        inference = "FedSOUL, reported"
        settings: Any = self.rivals(split)[inference]
        runs = self._runs(results, split, "FedPop", inference)
        never = sum(run["never visited"] for run in runs)
        if not never:
            return ""
        drawn = np.concatenate([np.sort(run["accuracies"])[run["never visited"] :] for run in runs])
        chance = (1 - settings.num_visited / split.silos) ** settings.num_rounds
        without = f"{100 * drawn.mean():.2f} ({100 * drawn.std():.2f})"
        return (
            f"- {inference}, {split.silos} silos: {never} of {split.silos * len(runs)} were never drawn in "
            f"{settings.num_rounds} rounds ({100 * chance:.1f}% to be expected) and have a head that was never "
            f"trained; without as many of the worst the accuracy is {without}.\n"
        )

    def _sent(self, split, inference):
        """Bytes to and from a silo by a rival: all it needs, as single-precision numbers; on average over silos."""
        inputs, classes, settings = methods.NUM_PIXELS, methods.NUM_CLASSES, self.rivals(split).get(inference)
        if settings is None:
            weights = num_weights([inputs, WIDTH, classes], biases=False)
            return 8 * weights * self.rounds if inference in ("FedAvg", INFORMED) else 0
        visits = settings.num_rounds
        if isinstance(settings, ReportedFedSoul):
            visits *= min(1, settings.num_visited / split.silos)
        return 8 * settings.num_sent(inputs, classes) * visits

    def _runs(self, results, split, model, inference):
        cells = [name(f"J = {split.silos}", model, inference, f"seed {seed}") for seed in self.seeds]
        return [results[cell] for cell in cells if cell in results]


def _shown(runs, score, unit, digits):
    """The mean, if all runs have it."""
    known = all(score in run for run in runs)
    return f"{unit * np.mean([run[score] for run in runs]):.{digits}f}" if known else ""
