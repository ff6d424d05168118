"""How fast each method comes to the answer of pooled NUTS."""

from pathlib import Path

import numpy as np

from .cases import splits


def draw(content: dict, path: Path) -> None:
    """Error of the means against rounds, a panel for each split."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = splits()
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained", sharey=True)
    for axis, (case, split) in zip(axes.flat, cases.items(), strict=True):
        gold = content[split.problem]["NUTS, pooled"]
        mean, sd = (np.array(gold[key]) for key in ("mean", "sd"))
        methods = {"SFVI": content[split.problem]["SFVI, K = 10"]}
        methods |= {name.split(",")[0]: content[case][f"{name}, K = 10"] for name in ("SFVI-Avg", "Sites")}
        for (method, found), color in zip(methods.items(), ("tab:gray", "tab:blue", "tab:red"), strict=True):
            way = found["path"]
            error = np.abs((np.array(way["mean"]) - mean) / sd).max(1)
            axis.loglog(way["rounds"], error, color=color, label=method, linewidth=1.8)
        if "meta-analysis" in content[case]:
            error = np.abs((np.array(content[case]["meta-analysis"]["mean"]) - mean) / sd).max()
            axis.plot([1], [error], "k^", label="meta-analysis")
        axis.axhline(0.2, color="black", linewidth=0.6, linestyle=":")
        axis.set_title(case, fontsize=10)
        axis.set_xlabel("exchanges")
    for axis in axes[:, 0]:
        axis.set_ylabel("largest error of a mean, in sds")
    handles, labels = axes.flat[3].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
