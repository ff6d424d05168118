"""How the settings of SFVI in Table 1 are chosen: by training images that are held out, never by test images."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ..errors import OptionError
from ..zoo import fed_pop
from . import hier_bnn_methods as methods
from .base import Cell, Results, markdown, name
from .hier_bnn import RADIUS, many_exchanges
from .hier_bnn_methods import NUM_DRAWS, WIDTH, Silos, Split
from .spec import check_seeds


class Candidate(NamedTuple):
    """Settings of SFVI.

    Attributes:
        steps: How many.
        step_size: Of Adam; it falls to zero.
        init_scale: How wide weights start.
    """

    steps: int
    step_size: float
    init_scale: float


@dataclasses.dataclass(frozen=True)
class HierBnnChoiceExperiment:
    """Settings.

    Attributes:
        dataset: Whose training images; its test images take no part.
        seeds: Of partitions; none of them one of the table's.
        splits: Numbers of silos, and rows in a step.
        share: Of a silo's own label among its rows.
        held_out: Share of every silo's training images to judge by.
        candidates: Among which to choose.
    """

    dataset: Literal["mnist", "fashion_mnist"]
    seeds: tuple[int, ...]
    splits: tuple[Split, ...]
    share: float
    held_out: float
    candidates: tuple[Candidate, ...]

    def __post_init__(self):
        check_seeds("hier_bnn_choice", self.seeds)
        if not 0 < self.held_out < 1 or not self.splits or len(set(self.candidates)) < max(len(self.candidates), 2):
            raise OptionError(
                "hier_bnn_choice: give a split, two candidates that differ, and a held_out between 0 and 1."
            )

    def cells(self) -> list[Cell]:
        """Candidate by candidate."""
        known = {"dataset": self.dataset, "share": self.share, "held out": self.held_out}
        known |= {"radius": RADIUS, "width": WIDTH, "draws": NUM_DRAWS}
        found = []
        for seed in self.seeds:
            for split in self.splits:
                load = partial(kept, self.dataset, split, self.share, self.held_out, seed)
                for candidate in self.candidates:
                    sfvi = many_exchanges(*candidate)
                    run = partial(methods.federated, fed_pop, sfvi, candidate.steps, load, split, seed)
                    found.append(Cell(self._cell(split, candidate, seed), {**known, **split._asdict()}, run))
        return found

    def report(self, results: Results) -> str:
        """Scores on held-out images, and for each number of steps the best log score over all splits."""
        columns = ["steps", "step size", "start width"]
        columns += [f"{score}, J = {split.silos}" for split in self.splits for score in ("accuracy, %", "log score")]
        rows, totals = [], {}
        for candidate in self.candidates:
            row = [f"{candidate.steps:,}", f"{candidate.step_size:g}", f"{candidate.init_scale:g}"]
            found = {
                split.silos: [results[cell] for cell in self._cells(split, candidate) if cell in results]
                for split in self.splits
            }
            for runs in found.values():
                row += [f"{100 * np.mean([run['accuracy'] for run in runs]):.2f}"] if runs else [""]
                row += [f"{np.mean([run['log score'] for run in runs]):.4f}"] if runs else [""]
            rows.append(row)
            if all(len(runs) == len(self.seeds) for runs in found.values()):
                totals[candidate] = np.mean([run["log score"] for runs in found.values() for run in runs])
        table = markdown(columns, rows, names=3)
        if len(totals) < len(self.candidates):
            return table
        lines = [f"- {steps:,} steps: {self._best(totals, steps)}" for steps in sorted({each.steps for each in totals})]
        return "\n".join([table, "Best mean log score:\n", *lines]) + "\n"

    def draw(self, results: Results, path: Path) -> None:
        """Log scores of the candidates."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axis = plt.subplots(figsize=(6.5, 3.5), layout="constrained")
        for split in self.splits:
            for position, candidate in enumerate(reversed(self.candidates)):
                scores = [results[cell]["log score"] for cell in self._cells(split, candidate) if cell in results]
                color = f"C{self.splits.index(split)}"
                axis.plot(scores, [position] * len(scores), "o", color=color, alpha=0.7)
            axis.plot([], [], "o", color=f"C{self.splits.index(split)}", label=f"{split.silos} silos")
        labels = [f"{each.steps:,} x {each.step_size:g}, width {each.init_scale:g}" for each in self.candidates]
        axis.set_yticks(range(len(labels)), labels[::-1], fontsize=8)
        axis.set_xlabel("log score on held-out training images")
        axis.legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=110)
        plt.close(figure)

    def _best(self, totals, steps):
        best = max((each for each in totals if each.steps == steps), key=lambda each: totals[each])
        return f"step size {best.step_size:g}, start width {best.init_scale:g} ({totals[best]:.4f})."

    def _cell(self, split, candidate, seed):
        words = f"{candidate.steps} x {candidate.step_size:g}, width {candidate.init_scale:g}"
        return name(f"J = {split.silos}", words, f"seed {seed}")

    def _cells(self, split, candidate):
        return [self._cell(split, candidate, seed) for seed in self.seeds]


def kept(dataset: str, split: Split, share: float, held_out: float, seed: int) -> tuple[Silos, Silos]:
    """The training images of each silo, parted at random into those to learn from and those to judge by."""
    train, _ = methods.partition(dataset, split, share, seed)
    generator = np.random.default_rng(seed)
    learned: Silos = {}
    judged: Silos = {}
    for silo, rows in train.items():
        order = generator.permutation(len(rows["y"]))
        cut = max(1, round(held_out * len(order)))
        judged[silo] = {part: values[order[:cut]] for part, values in rows.items()}
        learned[silo] = {part: values[order[cut:]] for part, values in rows.items()}
    return learned, judged
