"""Six cities over silos of all kinds: every method against NUTS on pooled data (supplement, Figure GLMM)."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.scipy.stats import norm

from .. import bounds, families, scores
from ..algorithms import SFVI, AlgorithmOptions, SFVIAvg, Sites
from ..baselines import meta_analysis, nuts
from ..data import by_order, by_size, equally, six_cities, take
from ..errors import OptionError
from ..zoo import logistic_mixed_model
from .base import Cell, Result, Results, attempt, markdown, name
from .spec import Rounds, check_seeds

PARAMETERS = ("intercept", "smoke", "age", "smoke:age", "omega")
NUM_LEVELS = 100  # quantiles of a marginal that are kept
NUM_DRAWS = 10  # of a unit in the locally enhanced bound
POOLED, ALONE, TWO_STAGE = "NUTS, pooled", "NUTS, a silo alone", "two-stage"
SPLITS: dict[str, Callable[[np.ndarray], dict[str, np.ndarray]]] = {
    "2 silos, 300 and 237": lambda outcome: by_size([300, 237], seed=1),
    "10 equal silos": lambda outcome: equally(len(outcome), 10, seed=1),
    "19 small silos": lambda outcome: equally(len(outcome), 19, seed=1),
    "5 silos sorted by outcome": lambda outcome: by_order(outcome, 5),
}


class Method(NamedTuple):
    """A federated method, and what decides its result beside the split and the seed."""

    algorithm: AlgorithmOptions
    rounds: int
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SixCitiesExperiment:
    """Settings.

    Attributes:
        splits: Names of the ways to split the children.
        seeds: Of the federated methods.
        pooled_draws: Of NUTS on pooled data, in each of two chains.
        silo_draws: Of NUTS on a silo's data.
        rounds: Of SFVI.
        average: Rounds and local steps of SFVI-Avg.
        sites: Rounds and local steps of Sites.
    """

    splits: tuple[str, ...]
    seeds: tuple[int, ...]
    pooled_draws: int
    silo_draws: int
    rounds: int
    average: Rounds
    sites: Rounds

    def __post_init__(self):
        check_seeds("six_cities", self.seeds)
        for split in self.splits:
            if split not in SPLITS:
                raise OptionError(f"six_cities: there is no split {split!r}; choose from {', '.join(SPLITS)}.")

    def methods(self) -> dict[str, Method]:
        """The federated ones."""
        enhanced = bounds.locally_enhanced(NUM_DRAWS)
        average = SFVIAvg(num_local_steps=self.average.steps, bound=enhanced)
        sites = Sites(num_local_steps=self.sites.steps, bound=enhanced)
        paper = SFVI(bound=bounds.elbo(), local_family=families.block(coupling="mean"))
        return {
            "SFVI, the paper's family": Method(paper, self.rounds, {"rounds": self.rounds}),
            "SFVI, locally enhanced": Method(SFVI(bound=enhanced), self.rounds, {"rounds": self.rounds}),
            "SFVI-Avg": Method(average, self.average.rounds, self.average._asdict()),
            "Sites": Method(sites, self.sites.rounds, self.sites._asdict()),
        }

    def cells(self) -> list[Cell]:
        """NUTS on all children, then split by split NUTS in each silo and the federated methods."""
        children = six_cities()
        found = [self._nuts(name("all", POOLED), {"all": children}, self.pooled_draws)]
        for split in self.splits:
            silos = take(children, SPLITS[split](children["y"].sum(1)))
            for silo, data in silos.items():
                found.append(self._nuts(name(split, ALONE, silo), {silo: data}, self.silo_draws))
            for title, method in self.methods().items():
                for seed in self.seeds:
                    run = partial(federated, silos, method, seed)
                    found.append(Cell(name(split, title, f"seed {seed}"), method.settings, run))
        return found

    def report(self, results: Results) -> str:
        """Every row: parameters, then what it cost."""
        if name("all", POOLED) not in results:
            return "NUTS on pooled data, which all is compared with, is not there yet.\n"
        gold = results[name("all", POOLED)]
        columns = ["split", "method", *PARAMETERS, "largest error", "rounds", "kB per silo", "CPU seconds"]
        own = [f"{mean:.3f} ({sd:.3f})" for mean, sd in zip(gold["mean"], gold["sd"], strict=True)]
        rows = [["all in one place", POOLED, *own, "", "", "", f"{gold['seconds']:.0f}"]]
        for split in self.splits:
            for method, runs in self.rows(split, results).items():
                rows.append([split, method, *_cells(runs, gold), *_costs(runs, gold)])
        lines = [
            "Every parameter: mean (sd) of the posterior; error of the mean in sds of pooled NUTS, with its standard "
            "error over seeds (or silos); 2-Wasserstein distance to the marginal of pooled NUTS, in its sds. "
            f"NUTS on pooled data: r-hat at most {gold['r_hat']:.4f}.",
            "",
            markdown(columns, rows, names=2),
        ]
        return "\n".join(lines)

    def rows(self, split: str, results: Results) -> dict[str, list[Result]]:
        """By method the runs that make a row: seeds of a federated method, silos of those on their own."""
        alone = [result for cell, result in results.items() if cell.startswith(name(split, ALONE, ""))]
        rows = {ALONE: alone, TWO_STAGE: [two_stage(alone)]} if alone else {}
        for method in self.methods():
            runs = [results[n] for seed in self.seeds if (n := name(split, method, f"seed {seed}")) in results]
            rows |= {method: runs} if runs else {}
        return rows

    def draw(self, results: Results, path: Path) -> None:
        """Marginals of the five parameters, a line of panels for each split."""
        from .six_cities_picture import draw

        if name("all", POOLED) not in results:
            return
        gold = results[name("all", POOLED)]
        draw(gold, {split: self.rows(split, results) for split in self.splits}, path)

    def _nuts(self, cell, silos, num_draws):
        return Cell(cell, {"draws": num_draws}, partial(sampled, silos, num_draws))


def sampled(silos: dict[str, Any], num_draws: int, state: Path) -> Result:
    """NUTS on the data of these silos."""
    del state  # it takes seconds
    begin = time.process_time()
    found = nuts(logistic_mixed_model(), silos, key=2, num_draws=num_draws)
    return _summary(found.columns(), time.process_time() - begin) | {"r_hat": round(found.r_hat, 5)}


def federated(silos: dict[str, Any], method: Method, seed: int, state: Path) -> Result:
    """One of our methods; if it diverges, where it was before."""
    begin = time.process_time()
    options = {"algorithm": method.algorithm, "num_rounds": method.rounds, "checkpoint": state}
    found, broke = attempt(logistic_mixed_model(), silos, key=seed, **options)
    seconds = time.process_time() - begin
    draws = found.posterior.sample(1, 20_000)
    columns = np.column_stack([np.asarray(draws["beta"]), np.asarray(draws["omega"])])
    _, done, there, back = found.communication.iloc[-1]
    return _summary(columns, seconds) | {"rounds": int(done), "bytes": int(done * (there + back))} | broke


def two_stage(alone: list[Result]) -> Result:
    """The silos' own posteriors combined by their variances, taken as Gaussian; one exchange of two numbers each."""
    mean, sd = meta_analysis(*(np.array([run[part] for run in alone]) for part in ("mean", "sd")))
    levels = (np.arange(NUM_LEVELS) + 0.5) / NUM_LEVELS
    return {
        "mean": mean.tolist(),
        "sd": sd.tolist(),
        "quantiles": (mean + sd * np.asarray(norm.ppf(levels))[:, None]).tolist(),
        "rounds": 1,
        "bytes": 2 * len(PARAMETERS) * 4,
        "seconds": max(run["seconds"] for run in alone),
    }


def errors(run: Result, gold: Result) -> np.ndarray:
    """Of the means, in sds of pooled NUTS."""
    return (np.array(run["mean"]) - gold["mean"]) / gold["sd"]


def distances(run: Result, gold: Result) -> np.ndarray:
    """2-Wasserstein, in sds of pooled NUTS."""
    return scores.wasserstein(np.array(run["quantiles"]), np.array(gold["quantiles"])) / np.array(gold["sd"])


def _summary(columns, seconds):
    quantiles = scores.quantiles(columns, num_levels=NUM_LEVELS)
    return {
        "mean": columns.mean(0).round(5).tolist(),
        "sd": columns.std(0, ddof=1).round(5).tolist(),
        "quantiles": quantiles.round(4).tolist(),
        "seconds": round(seconds, 1),
    }


def _cells(runs, gold):
    """One cell for each parameter."""
    mean, sd = (np.mean([run[part] for run in runs], axis=0) for part in ("mean", "sd"))
    away = np.array([errors(run, gold) for run in runs])
    distance = np.mean([distances(run, gold) for run in runs], axis=0)
    cells = []
    for i in range(len(PARAMETERS)):
        center, error = scores.mean_and_error(away[:, i])
        spread = "" if np.isnan(error) else f" ± {error:.2f}"
        cells.append(f"{mean[i]:.3f} ({sd[i]:.3f}); {center:+.2f}{spread}; {distance[i]:.2f}")
    return cells


def _costs(runs, gold):
    largest = np.mean([np.abs(errors(run, gold)).max() for run in runs])
    seconds = f"{np.mean([run['seconds'] for run in runs]):.0f}"
    if "rounds" not in runs[0]:
        return [f"{largest:.2f}", "0", "0", seconds]
    rounds = f"{max(run['rounds'] for run in runs):,}"
    if broke := [run["broke"] for run in runs if "broke" in run]:
        rounds = f"{len(broke)} of {len(runs)} diverged, first in round {min(broke)}"
    kilobytes = max(run["bytes"] for run in runs) / 1000
    return [f"{largest:.2f}", rounds, f"{kilobytes:,.2f}", seconds]
