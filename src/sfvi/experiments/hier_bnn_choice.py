"""How settings of Table 1 are chosen: by training images that are held out, for rivals as for ours."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ..algorithms import SFVIAvg
from ..errors import OptionError
from ..zoo import fed_pop
from ..zoo.bayesian_networks import RADIUS
from . import hier_bnn_methods as methods
from .base import Cell, Result, Results, markdown, name
from .hier_bnn_methods import NUM_DRAWS, WIDTH, Silos, Split
from .hier_bnn_settings import FairFedSoul, FairPFedBayes, Few, Many
from .spec import check_seeds


class Candidate(NamedTuple):
    """Settings to choose.

    Attributes:
        method: Whose; one is chosen for each.
        words: What they are.
        run: Fits a split with them.
    """

    method: str
    words: str
    run: Callable[..., Result]


@dataclasses.dataclass(frozen=True)
class HierBnnChoiceExperiment:
    """Settings.

    Attributes:
        dataset: Whose training images; its test images take no part.
        seeds: Of partitions; take others than the table's.
        splits: Numbers of silos, and rows in a step.
        share: Of a silo's own label among its rows.
        held_out: Share of every silo's training images to judge by.
        rounds: Of the methods with few rounds.
        many: Candidates for SFVI; those with equally many steps compete.
        few: For SFVI-Avg; those with the same power of the likelihood compete.
        p_fed_bayes: For pFedBayes, the `fair` one.
        fed_soul: For FedSOUL, the `fair` one.
    """

    dataset: Literal["mnist", "fashion_mnist"]
    seeds: tuple[int, ...]
    splits: tuple[Split, ...]
    share: float
    held_out: float
    rounds: int
    many: tuple[Many, ...]
    few: tuple[Few, ...]
    p_fed_bayes: tuple[FairPFedBayes, ...]
    fed_soul: tuple[FairFedSoul, ...]

    def __post_init__(self):
        check_seeds("hier_bnn_choice", self.seeds)
        if not 0 < self.held_out < 1 or not self.splits:
            raise OptionError("hier_bnn_choice: give at least one split, and a held_out between 0 and 1.")
        for option in ("many", "few", "p_fed_bayes", "fed_soul"):
            given = getattr(self, option)
            if len(set(given)) < len(given):
                raise OptionError(f"hier_bnn_choice: {option} has the same candidate twice; give each once.")

    def candidates(self, split: Split) -> list[Candidate]:
        """All of them, method by method."""
        found = []
        for many in self.many:
            run = partial(methods.federated, fed_pop, many.algorithm(), many.steps)
            words = f"step size {many.step_size:g}, start width {many.init_scale:g}"
            found.append(Candidate(f"SFVI, {many.steps:,} steps", words, run))
        for few in self.few:
            make = partial(fed_pop, power=few.power)
            run = partial(methods.federated, make, few.algorithm(SFVIAvg, split), self.rounds)
            words = f"step size {few.step_size:g}, start width {few.init_scale:g}, refit {few.refit_steps}"
            found.append(Candidate(f"SFVI-Avg{few.title}", words, run))
        for bayes in self.p_fed_bayes:
            run = partial(methods.personalized, bayes.rival(self.rounds, split))
            found.append(Candidate("pFedBayes", f"step size {bayes.step_size:g}, zeta {bayes.zeta:g}", run))
        for soul in self.fed_soul:
            run = partial(methods.langevin, soul.rival(self.rounds, split))
            found.append(Candidate("FedSOUL", f"step size {soul.step_size:g}, gamma {soul.gamma:g}", run))
        return found

    def cells(self) -> list[Cell]:
        """Candidate by candidate."""
        known = {"dataset": self.dataset, "share": self.share, "held out": self.held_out, "rounds": self.rounds}
        known |= {"radius": RADIUS, "width": WIDTH, "draws": NUM_DRAWS}
        found = []
        for seed in self.seeds:
            for split in self.splits:
                load = partial(kept, self.dataset, split, self.share, self.held_out, seed)
                for each in self.candidates(split):
                    run = partial(each.run, load, split, seed)
                    found.append(Cell(_cell(split, each, seed), {**known, **split._asdict()}, run))
        return found

    def report(self, results: Results) -> str:
        """Scores on held-out images, and for each method the candidate with the best log score over all splits."""
        columns, scores = ["method", "settings"], ("accuracy, %", "confidence, %", "log score")
        columns += [f"{score}, J = {split.silos}" for split in self.splits for score in scores]
        rows, totals = [], {}
        for each in self.candidates(self.splits[0]):
            found = [self._runs(results, split, each) for split in self.splits]
            row = [each.method, each.words]
            for runs in found:
                for score, factor, digits in (("accuracy", 100, 2), ("confidence", 100, 2), ("log score", 1, 4)):
                    row += [f"{factor * np.mean([run[score] for run in runs]):.{digits}f}"] if runs else [""]
            rows.append(row)
            complete = all(len(runs) == len(self.seeds) for runs in found)
            mean = np.mean([run["log score"] for runs in found for run in runs]) if complete else np.nan
            totals.setdefault(each.method, {})[each.words] = mean
        return "\n".join([markdown(columns, rows, names=2), *map(_choice, totals, totals.values()), ""])

    def draw(self, results: Results, path: Path) -> None:
        """Log scores of the candidates."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        every = self.candidates(self.splits[0])[::-1]
        figure, axis = plt.subplots(figsize=(8, 1 + 0.25 * len(every)), layout="constrained")
        for number, split in enumerate(self.splits):
            for position, each in enumerate(every):
                scores = [run["log score"] for run in self._runs(results, split, each)]
                axis.plot(scores, [position] * len(scores), "o", color=f"C{number}", alpha=0.7)
            axis.plot([], [], "o", color=f"C{number}", label=f"{split.silos} silos")
        axis.set_yticks(range(len(every)), [f"{each.method}: {each.words}" for each in every], fontsize=8)
        axis.set_xlabel("log score on held-out training images")
        axis.legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=110)
        plt.close(figure)

    def _runs(self, results, split, candidate):
        cells = [_cell(split, candidate, seed) for seed in self.seeds]
        return [results[cell] for cell in cells if cell in results]


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


def _cell(split, candidate, seed):
    return name(f"J = {split.silos}", candidate.method, candidate.words, f"seed {seed}")


def _choice(method, totals):
    """A line of the report; nothing is chosen before all candidates are there."""
    if np.isnan(list(totals.values())).any():
        return f"- {method}: not all candidates are there yet."
    best = max(totals, key=lambda words: totals[words])
    return f"- {method}: best mean log score with {best} ({totals[best]:.4f})."
