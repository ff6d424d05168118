"""What differential privacy costs: posteriors under a budget against those without noise."""

import dataclasses
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from ..algorithms import SFVI, UnitPrivacy
from ..algorithms.privacy import DROWNED
from ..algorithms.under_noise import MEANS, SCALES, average
from ..data import heart_disease, six_cities
from ..errors import OptionError
from ..fitting import fit
from ..model import StructuredModel
from ..zoo import logistic_mixed_model
from .base import Cell, Result, Results, markdown, name
from .spec import check_seeds

HEART = "heart disease"
TRUTH = {"beta": (-3.1, 0.45, -0.21, 0.1), "sd": 2.1}  # about what six cities says
COLUMNS = {
    "age": (55.0, 10.0),
    "sex": (0.5, 1.0),
    "exang": (0.5, 1.0),
    "oldpeak": (1.0, 1.0),
}  # shift and scale, public
Silos = dict[str, dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class PrivacyExperiment:
    """Settings.

    Attributes:
        seeds: Of simulated children and of the runs.
        children: Numbers of them, over three silos.
        heart: Whether the patients of the four hospitals are there too.
        epsilons: Budgets.
        delta: With them.
        rounds: Of SFVI.
        drawn: Units in a round, about; of fewer all.
        clip: In units of sqrt(d / n), with n units in all and d global latents, and of silos' own latents all.
    """

    seeds: tuple[int, ...]
    children: tuple[int, ...]
    heart: bool
    epsilons: tuple[float, ...]
    delta: float
    rounds: int
    drawn: int
    clip: float

    def __post_init__(self):
        check_seeds("privacy", self.seeds)
        if not self.epsilons or min(self.epsilons) <= 0 or min(self.children, default=100) < 100:
            raise OptionError("privacy: give positive epsilons, and at least 100 children.")

    def cells(self) -> list[Cell]:
        """Seed by seed; without noise first."""
        common: dict[str, Any] = {"rounds": self.rounds, "delta": self.delta, "drawn": self.drawn, "clip": self.clip}
        steps = {"wander": {"means": MEANS, "scales": SCALES}, "averages": "precisions"}
        data = [*map(children, self.children), *([HEART] if self.heart else [])]
        return [
            Cell(
                name(what, level(epsilon), f"seed {seed}"),
                common | (steps if epsilon is not None and math.isfinite(epsilon) else {}),
                partial(self.run, what, epsilon, seed),
            )
            for seed in self.seeds
            for what in data
            for epsilon in (None, math.inf, *sorted(self.epsilons, reverse=True))
        ]

    def run(self, what: str, epsilon: float | None, seed: int, state: Path) -> Result:
        """Means and sds of the global posterior; with an infinite epsilon gradients are shortened and have no noise."""
        model, silos = heart() if what == HEART else simulated(int(what.split()[0].replace(",", "")), seed)
        units = sum(len(silo["y"]) for silo in silos.values())
        privacy = None
        if epsilon is not None:
            latents = model.population.layout.size + (len(silos) if what == HEART else 0)  # an intercept of each
            clip = self.clip * math.sqrt(latents / units)
            rate = min(1.0, self.drawn / units)
            noise: Any = {"epsilon": epsilon} if math.isfinite(epsilon) else {"noise_multiplier": 0.0}
            privacy = UnitPrivacy(**noise, delta=self.delta, clip=clip, sampling_rate=rate)
        algorithm = SFVI(privacy=privacy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "privacy: The noise ")  # how much is the question here
            found = fit(model, silos, key=seed, num_rounds=self.rounds, algorithm=algorithm, checkpoint=state)
        mean, sd = (np.asarray(part, float).tolist() for part in found.posterior.shared.family.marginals())
        spent = found.privacy._asdict() if found.privacy is not None and math.isfinite(found.privacy.epsilon) else None
        return {"mean": mean, "sd": sd, "units": units, "privacy": spent, "seconds": found.seconds}

    def report(self, results: Results) -> str:
        """How far means are from those without noise, in posterior sds, and how sds compare."""
        rows = []
        for what in dict.fromkeys(cell.name.split(" / ")[0] for cell in self.cells()):
            for epsilon in (*sorted(self.epsilons), math.inf):
                cells = [name(what, level(epsilon), f"seed {seed}") for seed in self.seeds]
                found = [self.compare(what, epsilon, seed, results) for seed in self.seeds]
                found = [each for each in found if each is not None]
                if found:
                    spent = next(results[cell]["privacy"] for cell in cells if cell in results)
                    shifts, ratios = (np.concatenate([each[k] for each in found]) for k in (0, 1))
                    shift = f"{np.sqrt(np.mean(shifts**2)):.2f}"
                    spread = f"{np.exp(np.mean(np.log(ratios))):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
                    total = f"{math.sqrt(1 + np.mean(shifts**2)):.2f}"
                    left = foretold(what, spent)
                    if left is not None and left > DROWNED:
                        shift, total = (f"({part})" for part in (shift, total))
                    known = [what, f"{epsilon:g}", "" if left is None else f"{left:.2f}"]
                    rows.append([*known, shift, spread, total, str(len(found))])
        columns = ["data", "epsilon", "foretold", "error of means, in sds", "sd, over that without noise"]
        return markdown([*columns, "error in all", "seeds"], rows)

    def compare(self, what: str, epsilon: float, seed: int, results: Results) -> tuple[np.ndarray, np.ndarray] | None:
        """Shifts of means in sds, and ratios of sds; None where a cell is missing."""
        pair = [results.get(name(what, level(e), f"seed {seed}")) for e in (epsilon, None)]
        if pair[0] is None or pair[1] is None:
            return None
        private, exact = ({k: np.array(each[k]) for k in ("mean", "sd")} for each in pair if each is not None)
        return (private["mean"] - exact["mean"]) / exact["sd"], private["sd"] / exact["sd"]

    def draw(self, results: Results, path: Path) -> None:
        """Error of means against epsilon, a line for each number of units."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
        for what in dict.fromkeys(cell.name.split(" / ")[0] for cell in self.cells()):
            points = []
            for epsilon in sorted(self.epsilons):
                found = [self.compare(what, epsilon, seed, results) for seed in self.seeds]
                shifts = [each[0] for each in found if each is not None]
                if shifts:
                    points.append((epsilon, np.sqrt(np.mean(np.concatenate(shifts) ** 2))))
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=what)
        axis.axhline(1.0, color="tab:gray", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="epsilon", ylabel="error of means, in posterior sds")
        if axis.lines[:-1]:
            axis.legend(frameon=False)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def foretold(what: str, spent: dict[str, Any] | None) -> float | None:
    """What could be said before a run of how much of its noise would be left; None without noise."""
    if spent is None:
        return None
    privacy = UnitPrivacy(**{part: spent[part] for part in ("clip", "noise_multiplier", "sampling_rate")})
    return average(privacy, num_silos=4 if what == HEART else 3, num_rounds=spent["rounds"])


def children(number: int) -> str:
    """The name of simulated data."""
    return f"{number:,} children"


def level(epsilon: float | None) -> str:
    """The name of a budget; None for no privacy at all."""
    return "no noise" if epsilon is None else f"epsilon {epsilon:g}"


def simulated(number: int, seed: int) -> tuple[StructuredModel, Silos]:
    """Children like those of six cities, over three silos, two of equal size and one half as large."""
    generator, known = np.random.default_rng(seed), six_cities()
    x = known["x"][generator.integers(len(known["x"]), size=number)]
    effect = TRUTH["sd"] * generator.normal(size=number)[:, None]
    chance = 1 / (1 + np.exp(-(x @ np.array(TRUTH["beta"]) + effect)))
    y = (generator.random(chance.shape) < chance).astype(known["y"].dtype)
    ends = [0, 2 * number // 5, 4 * number // 5, number]
    parts = {
        silo: {"x": x[start:end], "y": y[start:end]}
        for silo, start, end in zip(("a", "b", "c"), ends[:-1], ends[1:], strict=True)
    }
    return logistic_mixed_model(), parts


def heart() -> tuple[StructuredModel, Silos]:
    """Disease by age, sex, angina and ST depression, with an intercept of each hospital; complete patients only."""
    silos = {}
    for hospital, table in heart_disease().items():
        complete = np.asarray(table[[*COLUMNS, "disease"]].dropna(), float)
        shift, scale = np.array(list(COLUMNS.values())).T
        silos[hospital] = {"x": (complete[:, :-1] - shift) / scale, "y": complete[:, -1]}

    def population():
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.5).expand([len(COLUMNS)]).to_event(1))
        return intercept, beta, numpyro.sample("between", dist.HalfNormal(1.0))

    def silo(globals_: Any, data: Any):
        intercept, beta, between = globals_
        hospital = numpyro.sample("hospital", dist.Normal(0.0, 1.0))
        with numpyro.plate("patients", data["x"].shape[0]):
            eta = intercept + between * hospital + jnp.sum(data["x"] * beta, axis=-1)
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=data["y"])

    return StructuredModel(population, silo), silos
