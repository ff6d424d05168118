"""The demonstration: six cities over two silos, against NUTS."""

import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .algorithms import SFVI, AlgorithmOptions, Sites
from .baselines import nuts
from .data import six_cities as load_six_cities
from .data import split_units
from .fitting import fit
from .zoo import logistic_mixed_model

PARAMETERS = ["beta[intercept]", "beta[smoke]", "beta[age]", "beta[smoke:age]", "omega"]
SIZES = {"north": 300, "south": 237}
Draws = np.ndarray  # (draws, 5)


def six_cities(output: Path, *, num_rounds: int, sites_rounds: int, num_draws: int) -> dict[str, Draws]:
    """Fit, compare, print one table and write the picture of the five marginals.

    Args:
        output: Folder for the picture.
        num_rounds: Rounds of SFVI.
        sites_rounds: Rounds of Sites.
        num_draws: NUTS draws per chain, after as many for warm-up; two chains.

    Returns:
        Draws of the five global parameters by method.
    """
    console = Console(width=112)
    console.print("Six cities: wheeze of 537 children; logistic regression with a random intercept per child.")
    pooled = load_six_cities()
    silos, _ = split_units(pooled, SIZES, seed=1)
    draws, exchanged = {}, {}

    def record(method, compute):
        begin = time.perf_counter()
        with console.status(f"{method} ..."):
            draws[method] = compute()
        console.print(f"  {method}: {time.perf_counter() - begin:.1f} s")

    def federated(algorithm: AlgorithmOptions, rounds):
        result = fit(logistic_mixed_model(), silos, key=0, num_rounds=rounds, algorithm=algorithm)
        name, rounds, there, back = result.communication.iloc[-1]
        exchanged[name] = f"{name}: {rounds:,} exchanges of {there} bytes to a silo and {back} bytes back"
        return _columns(result.posterior.sample(jax.random.key(1), 10_000))

    def sampled(data):
        return nuts(logistic_mixed_model(), data, key=2, num_draws=num_draws, progress=False).columns()

    record("NUTS, pooled data", lambda: sampled({"all": pooled}))
    record("SFVI, two silos", lambda: federated(SFVI(), num_rounds))
    record("Sites, two silos", lambda: federated(Sites(), sites_rounds))
    for name in SIZES:
        record(f"NUTS, {name} alone", lambda name=name: sampled({name: silos[name]}))
    console.print(_table(draws))
    picture = _plot(draws, output)
    console.print("; ".join(exchanged.values()) + ". No child's data left its silo.")
    console.print(f"Marginals: {picture}")
    return draws


def _columns(draws):
    return np.column_stack([np.asarray(draws["beta"]), np.asarray(draws["omega"])])


def _table(draws):
    table = Table(title="Posterior mean (sd) and error of the mean, in sds of pooled NUTS", title_style="bold")
    table.add_column("")
    for name in PARAMETERS:
        table.add_column(escape(name), justify="right")
    gold = draws["NUTS, pooled data"]
    for method, columns in draws.items():
        error = (columns.mean(0) - gold.mean(0)) / gold.std(0)
        cells = zip(columns.mean(0), columns.std(0), error, strict=True)
        table.add_row(method, *(f"{m:.3f} ({s:.3f}) {e:+.2f}" for m, s, e in cells))
    return table


def _plot(draws, output):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = [("black", "-"), ("tab:red", "-"), ("tab:orange", "-"), ("tab:blue", "--"), ("tab:green", "--")]
    figure, axes = plt.subplots(1, 5, figsize=(16, 3.2), layout="constrained")
    for index, (name, axis) in enumerate(zip(PARAMETERS, axes, strict=True)):
        for (method, columns), (color, line) in zip(draws.items(), styles, strict=True):
            grid, density = _density(columns[:, index])
            axis.plot(grid, density, line, color=color, label=method, linewidth=1.6)
        axis.set_title(name)
        axis.set_yticks([])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "six_cities.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _density(values):
    """Gaussian kernel density with Silverman's bandwidth."""
    width = 1.06 * values.std() * len(values) ** -0.2
    grid = np.linspace(values.min(), values.max(), 200)
    kernel = np.exp(-0.5 * ((grid[:, None] - values[None, :]) / width) ** 2)
    return grid, kernel.mean(1) / (width * np.sqrt(2 * np.pi))
