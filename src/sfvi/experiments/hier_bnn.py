"""Bayesian networks over silos that differ very much (Table 1 of the paper)."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optax
from numpyro.infer import init_to_uniform

from .. import families
from ..algorithms import SFVI, SFVIAvg, Sites
from ..baselines import FedSoul, PFedBayes, ReportedFedSoul
from ..baselines.networks import num_weights
from ..errors import OptionError
from ..zoo import fed_pop, hierarchical_bnn
from . import hier_bnn_methods as methods
from .base import Cell, Result, Results, markdown, name
from .hier_bnn_methods import NUM_DRAWS, POOLED_BATCH, WIDTH, Split
from .spec import check_seeds

RADIUS = 0.1  # where weights start
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
Method = tuple[str, str]  # model and inference


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
        sfvi = many_exchanges(self.steps, self.step_size, self.init_scale)
        few = {"optimizer": optax.adam(self.local_step_size), "init_scale": self.local_init_scale}
        few |= {"refit_steps": self.refit_steps, **_mean_field()}
        average, sites = (each(num_local_steps=steps, **few) for each in (SFVIAvg, Sites))
        found: dict[Method, Callable[..., Result]] = {}
        for title, make in ((BNN, hierarchical_bnn), (POP, fed_pop)):
            found[title, "SFVI"] = partial(methods.federated, make, sfvi, self.steps)
            found[title, "SFVI-Avg"] = partial(methods.federated, make, average, rounds)
            found[title, "Sites"] = partial(methods.federated, make, sites, rounds)
        for inference, settings in self.rivals(split).items():
            if isinstance(settings, PFedBayes):
                found["pFedBayes", inference] = partial(methods.personalized, settings)
            else:
                found["FedPop", inference] = partial(methods.langevin, settings)
        found["network", "FedAvg"] = partial(methods.averaged, self.local_step_size, rounds)
        found[BNN, "each silo alone"] = partial(methods.alone, sfvi, self.steps)
        found[BNN, "pooled"] = partial(methods.pooled, sfvi, self.steps)
        found["", "majority"] = methods.majority
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
                load = partial(methods.partition, self.dataset, split, self.share, seed)
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
        columns = ["silos", "model", "inference", "accuracy, % (sd)", "paper", "log score", "ECE, %", "confidence, %"]
        columns += ["off-majority, %", "even, %", "rounds", "MB a silo"]
        rows = []
        for split in self.splits:
            for model, inference in self.methods(split):
                runs = self._runs(results, split, model, inference)
                if not runs:
                    continue
                each = 100 * np.concatenate([run["accuracies"] for run in runs])
                shown = [f"{each.mean():.2f} ({each.std():.2f})", PAPER.get((split.silos, model, inference), "")]
                shown += [_shown(runs, *column) for column in COLUMNS]
                sent = np.mean([run.get("bytes", self._sent(split, inference)) for run in runs]) / 1e6
                broke = sum("broke" in run for run in runs)
                done = f"{broke} of {len(runs)} diverged" if broke else f"{runs[0]['rounds']:,}"
                rows.append([str(split.silos), model, inference, *shown, done, f"{sent:,.1f}" if sent else ""])
        counts = {len(self._runs(results, split, *method)) for split in self.splits for method in self.methods(split)}
        note = f"Partitions: {min(counts)} to {max(counts)}" if len(counts) > 1 else f"Partitions: {max(counts)}"
        table = f"{note}. The sd is over silos and partitions.\n\n" + markdown(columns, rows, names=3)
        spreads = "".join(self._spread(results, split) for split in self.splits)
        return table + (f"\n{spreads}" if spreads else "")

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
            return 8 * weights * self.rounds if inference == "FedAvg" else 0
        visits = settings.num_rounds
        if isinstance(settings, ReportedFedSoul):
            visits *= min(1, settings.num_visited / split.silos)
        return 8 * settings.num_sent(inputs, classes) * visits

    def _runs(self, results, split, model, inference):
        cells = [name(f"J = {split.silos}", model, inference, f"seed {seed}") for seed in self.seeds]
        return [results[cell] for cell in cells if cell in results]


def many_exchanges(steps: int, step_size: float, init_scale: float) -> SFVI:
    """SFVI with Adam, whose step falls to zero."""
    decay = optax.cosine_decay_schedule(step_size, steps)
    return SFVI(optimizer=optax.adam(decay), init_scale=init_scale, **_mean_field())


def _mean_field() -> dict[str, Any]:
    random: Any = init_to_uniform
    return {
        "global_family": families.mean_field(),
        "local_family": families.block(coupling="none"),
        "init_loc_fn": partial(random, radius=RADIUS),
    }


def _shown(runs, score, unit, digits):
    """The mean over those runs that have it."""
    values = [run[score] for run in runs if score in run]
    return f"{unit * np.mean(values):.{digits}f}" if values else ""
