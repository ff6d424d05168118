"""The two figures of the paper about topics."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Runs = Mapping[tuple[str, str], list[dict[str, Any]]]
COLORS = {"SFVI": "tab:red", "SFVI-Avg": "tab:blue", "Sites": "tab:green", "pooled": "black"}
LINES = {"published": "-", "printed": ":"}
WINDOW = 12  # points of an ELBO that are averaged: each is of some minibatches


def draw(runs: Runs, steps_per_round: int, path: Path) -> None:
    """Coherence of each topic by method; ELBO against rounds.

    Args:
        runs: Results of each method, by model and inference.
        steps_per_round: Local steps that count as a round.
        path: Of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 5.5), layout="constrained", width_ratios=[1, 1, 1.1])
    known = [method for method, found in runs.items() if found]
    for axis, score, title in ((axes[0], "umass", "UMass"), (axes[1], "npmi", "NPMI")):
        for position, method in enumerate(reversed(known)):
            values = np.concatenate([run[score] for run in runs[method]])
            axis.plot(values, np.full(len(values), position), "o", color="tab:gray", markersize=2.5, alpha=0.4)
            axis.plot(values.mean(), position, "|", color="tab:red", markersize=14)
        axis.set_xlabel(f"{title} of a topic (red: mean)")
        axis.grid(axis="x", linewidth=0.4)
    axes[0].set_yticks(range(len(known)), [", ".join(method) for method in reversed(known)], fontsize=8)
    axes[1].set_yticks(range(len(known)), [""] * len(known))
    for model, line in LINES.items():
        for method, color in COLORS.items():
            for run in runs.get((model, method), [])[:1]:
                steps, elbo = (averaged(np.array(part)) for part in run["elbo"])
                axes[2].plot(steps / steps_per_round, elbo / 1e6, line, color=color, label=f"{model}, {method}", lw=1.2)
    if axes[2].lines:
        axes[2].legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes[2].set_xlabel(f"rounds of {steps_per_round:,} steps (running means)")
    axes[2].set_ylabel("ELBO, millions")
    axes[2].grid(linewidth=0.4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def averaged(values: np.ndarray) -> np.ndarray:
    """Running means; of a short way as it is."""
    if len(values) < 2 * WINDOW:
        return values
    return np.convolve(values, np.full(WINDOW, 1 / WINDOW), mode="valid")
