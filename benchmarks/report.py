"""Tables in Markdown, and pictures."""

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import matplotlib
import numpy as np

from sfvi.bench.step import HAND, MERGED, TARGETS, Comparison, Effort

from .scaling import Case, Cost

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PACKAGES = ("sfvi", "jax", "jaxlib", "numpyro", "optax", "equinox", "numpy")

INTRODUCTION = """\
**What is compared.** One step of SFVI, every silo in one process, on the compiled loop that `sfvi.fit` runs; the
loop one would write by hand in JAX for the pooled data; and `numpyro.infer.SVI` with the same family as a guide,
its `update` in a jitted scan (faster than `svi.run`, which compiles anew at every call). The data are six cities,
537 children at four ages, and the family the structured Gaussian, with full covariance of the five global latents
and every child's effect following them. Everyone uses float32, Adam with the same schedule, one Monte Carlo sample
and the same number of steps. SFVI and the loop take the gradient that sticks the landing; NumPyro's `Trace_ELBO`
takes the plain one: same value, about the same cost. *Noise carried* is the loop tuned: its noise is drawn one step
ahead, because XLA's CPU compiler otherwise recomputes the inverse error function behind it in every fusion that
uses it. *Stacked* is how algorithms compute that need each silo's own reply; `sfvi.fit` lays silos end to end for
SFVI.

**How.** Contestants take turns, {repetitions} repetitions of {steps:,} steps each after one that compiles and is
not timed. This keeps the noise of the machine out of the ratios, which are given for the fastest repetition and for
the median one. That all compute the same thing is checked at the end, where the step size has fallen to zero: the
ELBO averages of the last {steps:,} steps may differ by a few standard errors, or a thousandth, only (NumPyro's
estimator is noisier and not quite done by then).
"""

SCALING = """\
Simulated data of the same model, a process to every case. *Set-up* goes from the silos' arrays to the state before
the first round; *compilation* is the first call of the loop; memory is the peak of the process above that of one
that only imports. The cases take turns; every figure is the smallest of {passes}. *Ragged* silos hold 5 to 15 units.
"""


def introduction(effort: Effort) -> str:
    """What is compared and how."""
    return INTRODUCTION.format(repetitions=effort.repetitions, steps=effort.steps).strip()


def scaling_introduction(passes: int) -> str:
    """What grows and what is measured."""
    return SCALING.format(passes=passes).strip()


def machine() -> str:
    """Cores and versions."""
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    system = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    return f"{system}, Python {platform.python_version()}, {versions}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column to the left, readable as plain text too."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells):
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]) + " |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def step_table(comparison: Comparison) -> str:
    """One row for each contestant: time, its ratio to SFVI's, and the ELBO where it ended."""
    header = ["", "µs, min", "µs, median", "SFVI / this, min", "median", "last ELBO (SE)", "apart, in SE"]
    rows = []
    for name, outcome in comparison.outcomes.items():
        micros = [f"{1e6 * s(outcome.seconds):.1f}" for s in (np.min, np.median)]
        ratios = [f"{comparison.ratio(MERGED, name, s):.2f}" for s in (np.min, np.median)]
        apart = "" if name == HAND else f"{comparison.disagreement(name):+.1f}"
        rows.append([name, *micros, *ratios, f"{outcome.elbo:.2f} ({outcome.standard_error:.2f})", apart])
    return table(header, rows)


def verdict(comparison: Comparison) -> str:
    """One line for each target."""
    lines = []
    for other, target in TARGETS[comparison.num_silos].items():
        least, middle = (comparison.ratio(MERGED, other, s) for s in (np.min, np.median))
        met = "met" if max(least, middle) <= target else "missed"
        lines.append(f"- SFVI / {other}: {least:.2f} (median {middle:.2f}); target at most {target:.2f}: {met}.")
    return "\n".join(lines)


def scaling_table(costs: Mapping[Case, Cost], *, over: str) -> str:
    """One row for each case; the ratio is that of the time for a row of data, to one silo's or to the most rows'."""
    base = max(costs, key=lambda case: case.rows)  # the first one if all have the same
    ratio_label = "time for a row / most rows" if over == "rows" else "step / one silo"
    header = ["silos", "rows", "ms a step", ratio_label, "set-up, s", "compilation, s", "memory, MB"]
    rows = []
    for case, cost in costs.items():
        ratio = cost.step_seconds / costs[base].step_seconds * base.rows / case.rows
        numbers = [f"{1e3 * cost.step_seconds:.3g}", f"{ratio:.2f}"]
        numbers += [f"{cost.setup_seconds:.1f}", f"{cost.compile_seconds:.1f}", f"{cost.memory_bytes / 1e6:.0f}"]
        rows.append([_label(case), f"{case.rows:,}", *numbers])
    return table(header, rows)


def _label(case):
    extra = [word for word, is_so in (("ragged", case.ragged), ("stacked", not case.merge)) if is_so]
    return ", ".join([f"{case.num_silos:,}", *extra])


def plot(path: Path, costs: Mapping[Case, Cost], *, over: str) -> None:
    """Draw time per step and peak memory over "num_silos" or "rows", both axes logarithmic."""
    merged = {case: cost for case, cost in costs.items() if case.merge}
    panels = {
        "seconds per step": {case: cost.step_seconds for case, cost in merged.items()},
        "peak memory above import, MB": {case: cost.memory_bytes / 1e6 for case, cost in merged.items()},
    }
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        _draw(axis, values, over)
        axis.set_xlabel({"num_silos": "silos, same data", "rows": "rows of data, same silos"}[over])
        axis.set_title(title)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw(axis, values, over):
    even = {getattr(case, over): value for case, value in values.items() if not case.ragged}
    ragged = {getattr(case, over): value for case, value in values.items() if case.ragged}
    sizes, heights = np.array(list(even), float), np.array(list(even.values()))
    axis.loglog(sizes, heights, "o-", color="tab:red", label="SFVI")
    if ragged:
        axis.loglog(*zip(*ragged.items(), strict=True), "x", color="black", markersize=9, label="ragged silos")
    if over == "rows":
        axis.loglog(sizes, heights[-1] * sizes / sizes[-1], "--", color="gray", label="slope 1")
        axis.set_ylim(bottom=heights.min() / 4)
    else:
        axis.axhline(heights[0], linestyle="--", color="gray", label="one silo: pooled data")
        axis.set_ylim(heights[0] / 10, heights[0] * 10)
