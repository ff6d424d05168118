"""SFVI from scratch against a few rounds of SFVI-Avg first (supplement, Figure fast start)."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
from scipy.optimize import isotonic_regression

from ..algorithms import SFVI, FastStart
from ..errors import OptionError
from ..fitting import fit
from .base import Cell, Result, Results, markdown, name
from .multinomial import Split, model_of, silos_of
from .spec import Rounds, check_seeds

SCRATCH, FAST = "from scratch", "fast start"
WINDOW = 20  # rounds over which ELBO estimates are averaged
GAPS = (1000, 300, 100, 50)  # nats below the ELBO at which a run from scratch ends


@dataclasses.dataclass(frozen=True)
class FastStartExperiment:
    """Settings.

    Attributes:
        seeds: Of the choice of images, and of the runs.
        split: Number of silos, rows of each, and rows in a batch.
        rounds: Of SFVI.
        step_size: Of Adam; it stays, so that the schedule does not decide when a run arrives.
        start: Rounds and local steps of SFVI-Avg.
    """

    seeds: tuple[int, ...]
    split: Split
    rounds: int
    step_size: float
    start: Rounds

    def __post_init__(self):
        check_seeds("fast_start", self.seeds)
        if self.rounds < 10 * WINDOW:
            raise OptionError(f"fast_start: rounds is {self.rounds}; give at least {10 * WINDOW}.")

    def cells(self) -> list[Cell]:
        """Both ways for every seed."""
        fast = FastStart(rounds=self.start.rounds, num_local_steps=self.start.steps)
        settings = {"rounds": self.rounds, "step size": self.step_size, **self.split._asdict()}
        found = []
        for seed in self.seeds:
            for way, start in ((SCRATCH, None), (FAST, fast)):
                algorithm = SFVI(optimizer=optax.adam(self.step_size), fast_start=start)
                run = partial(climb, algorithm, self.rounds, self.split, seed)
                own = {"start": self.start._asdict()} if start else {}
                found.append(Cell(name(way, f"seed {seed}"), {**settings, **own}, run))
        return found

    def report(self, results: Results) -> str:
        """How many rounds and steps each way takes to the same ELBO."""
        rows = []
        seeds = self._seeds(results)
        for gap in GAPS:
            found = [self.compare(gap, results, seed) for seed in seeds]
            if not found:
                continue
            slow, quick = np.mean(found, axis=0)
            steps = quick - self.start.rounds + self.start.rounds * self.start.steps
            if np.isnan(quick):
                rows.append([f"{gap:,}", f"{slow:,.0f}", "not reached", "", "", ""])
                continue
            ratios = f"{slow / quick:.1f}", f"{slow / steps:.2f}"
            rows.append([f"{gap:,}", f"{slow:,.0f}", f"{quick:,.0f}", ratios[0], f"{steps:,.0f}", ratios[1]])
        columns = ["nats below the end", "rounds from scratch", "rounds with a fast start", "ratio of rounds"]
        columns += ["steps with a fast start", "ratio of steps"]
        return f"Means over seeds: {len(seeds)}.\n\n" + markdown(columns, rows)

    def compare(self, gap: float, results: Results, seed: int) -> tuple[float, float]:
        """Rounds to an ELBO from scratch and with a fast start, that one's own rounds counted.

        The ELBO is `gap` below that of the last tenth of the run from scratch. When a run is there is read off the
        increasing curve nearest to its estimates: their noise would have it there too early.
        """
        slow, quick = (np.array(results[name(way, f"seed {seed}")]["elbo"]) for way in (SCRATCH, FAST))
        level = slow[-(len(slow) // 10) :].mean() - gap
        return WINDOW * (1 + _first(slow, level)), self.start.rounds + WINDOW * (1 + _first(quick, level))

    def draw(self, results: Results, path: Path) -> None:
        """ELBO against rounds and against steps."""
        if not self._seeds(results):
            return
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
        before = {SCRATCH: (0, 0), FAST: (self.start.rounds, self.start.rounds * self.start.steps)}
        for way, color in ((SCRATCH, "tab:gray"), (FAST, "tab:red")):
            for number, seed in enumerate(self._seeds(results)):
                elbo = np.array(results[name(way, f"seed {seed}")]["elbo"])
                for axis, offset in zip(axes, before[way], strict=True):
                    rounds = offset + WINDOW * (1 + np.arange(len(elbo)))
                    axis.plot(rounds, elbo, color=color, linewidth=1.2, label=way if number == 0 else None)
        levels = [results[name(SCRATCH, f"seed {seed}")]["elbo"] for seed in self._seeds(results)]
        bottom, top = np.quantile(levels, 0.05), np.max(levels)
        axes[0].set_ylim(bottom, top + 0.1 * (top - bottom))
        for axis, what in zip(axes, ("rounds", "steps, those of SFVI-Avg counted"), strict=True):
            axis.set_xlabel(what)
            axis.set_xlim(0, self.rounds)
        axes[0].set_ylabel("ELBO")
        axes[0].legend(frameon=False)
        figure.savefig(path, dpi=110)
        plt.close(figure)

    def _seeds(self, results):
        return [seed for seed in self.seeds if all(name(way, f"seed {seed}") in results for way in (SCRATCH, FAST))]


def climb(algorithm: SFVI, rounds: int, split: Split, seed: int, state: Path) -> Result:
    """The ELBO of SFVI's rounds, averaged over windows; those of a fast start are left out."""
    silos: dict[str, Any] = silos_of(split, seed)
    found = fit(model_of(split), silos, key=seed, num_rounds=rounds, algorithm=algorithm, checkpoint=state)
    elbo = found.elbo[-rounds:]
    windows = elbo[: len(elbo) // WINDOW * WINDOW].reshape(-1, WINDOW).mean(1)
    return {"elbo": windows.round(2).tolist(), "seconds": found.seconds}


def _first(elbo, level):
    """The first window at a level; NaN if it is never reached."""
    reached = isotonic_regression(elbo).x >= level
    return float(np.argmax(reached)) if reached.any() else np.nan
