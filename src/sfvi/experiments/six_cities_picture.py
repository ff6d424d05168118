"""The marginals of six cities by every method, as the paper draws them."""

from pathlib import Path
from typing import Any

import numpy as np

from .base import Result

COLORS = {
    "NUTS, a silo alone": ("0.75", "-", 0.8),
    "two-stage": ("tab:purple", ":", 1.6),
    "SFVI, the paper's family": ("tab:blue", "--", 1.4),
    "SFVI, locally enhanced": ("tab:red", "-", 1.6),
    "SFVI-Avg": ("tab:green", "-.", 1.4),
    "Sites": ("tab:orange", "--", 1.6),
}


def draw(gold: Result, splits: dict[str, dict[str, list[Result]]], path: Path) -> None:
    """A line of panels for each split: marginals of the first seed, over those of pooled NUTS (black)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from .six_cities import PARAMETERS

    figure, axes = plt.subplots(
        len(splits), len(PARAMETERS), figsize=(15, 2.6 * len(splits)), layout="constrained", squeeze=False
    )
    labels: dict[str, Any] = {}
    for line, (split, rows) in zip(axes, splits.items(), strict=True):
        line[0].set_ylabel(split, fontsize=9)
        for index, axis in enumerate(line):
            grid = np.linspace(*_window(gold, rows, index), 300)
            for method, runs in rows.items():
                color, style, width = COLORS[method]
                for run in runs if method.startswith("NUTS") else runs[:1]:
                    (handle,) = axis.plot(grid, density(run, index, grid), style, color=color, linewidth=width)
                    labels.setdefault(method, handle)
            (handle,) = axis.plot(grid, density(gold, index, grid), color="black", linewidth=1.8, zorder=5)
            labels.setdefault("NUTS, pooled", handle)
            axis.set_ylim(0, 2.2 * density(gold, index, grid).max())
            axis.set_yticks([])
    for axis, parameter in zip(axes[0], PARAMETERS, strict=True):
        axis.set_title(parameter)
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def density(run: Result, index: int, grid: np.ndarray) -> np.ndarray:
    """Kernel density estimate from the quantiles of a marginal, with Silverman's bandwidth."""
    points = np.array(run["quantiles"])[:, index]
    width = max(1.06 * points.std() * len(points) ** -0.2, 1e-9)
    kernel = np.exp(-0.5 * ((grid[:, None] - points) / width) ** 2)
    return kernel.mean(1) / (width * np.sqrt(2 * np.pi))


def _window(gold, rows, index):
    """Wide enough for the marginals of all but silos on their own and runs that diverged."""
    center, sd = gold["mean"][index], gold["sd"][index]
    reach = 5.0 * sd
    for method, runs in rows.items():
        if not method.startswith("NUTS") and "broke" not in runs[0]:
            reach = max(reach, abs(runs[0]["mean"][index] - center) + 4 * runs[0]["sd"][index])
    reach = min(reach, 12 * sd)
    return center - reach, center + reach
