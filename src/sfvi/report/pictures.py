"""The pictures of a report."""

import itertools
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy.stats import gaussian_kde

from .html import Html, join, number, tag
from .svg import COLORS, canvas, inline

WIDTHS = {"wide": 7.8, "narrow": 3.7}  # inches: every plot is there twice, and the page shows the one that fits
BINS = 300
MOST_SILOS = 60
RGB = (0.29, 0.50, 0.72)  # an accent that can be seen on white and on black


def _in_both(draw: Callable, *, name: str, words: str, height: float) -> Html:
    """A plot for wide screens and paper, and one for narrow screens, whose text can still be read there."""
    made = []
    for kind, width in WIDTHS.items():
        with canvas(width, height) as (figure, axes):
            draw(axes, kind == "narrow")
            made.append(tag("div", inline(figure, name=f"{name}-{kind}", words=words), class_=kind))
    return join(made)


def bound_by_round(elbo: np.ndarray, *, what: str) -> Html:
    """The estimate of the bound in every round; of many rounds their mean and range, bin by bin.

    The first rounds of a run are often far below all others: the axis begins where the middle of the run lies, with
    room for what came before as far as it does not flatten the rest.
    """
    known = np.isfinite(elbo)
    words = f"The {what} by round: {number(elbo[known][0])} in the first and {number(elbo[known][-1])} in the last."

    def draw(axes, narrow):
        if len(elbo) > 2 * BINS:
            edges = np.linspace(0, len(elbo), BINS + 1).astype(int)
            parts = [elbo[a:b][known[a:b]] for a, b in itertools.pairwise(edges)]
            middles = (edges[:-1] + edges[1:] + 1) / 2
            low, mean, high = (
                np.array([f(part) if len(part) else np.nan for part in parts]) for f in (np.min, np.mean, np.max)
            )
            axes.fill_between(middles, low, high, color=COLORS["soft"], linewidth=0)
            axes.plot(middles, mean, color=COLORS["accent"], linewidth=1.4)
        else:
            marks = {"marker": "o", "markersize": 3} if len(elbo) <= 60 else {}
            axes.plot(np.arange(1, len(elbo) + 1), elbo, color=COLORS["accent"], linewidth=1.2, **marks)
        axes.set_ylim(*_window(elbo[known]))
        axes.set_xlim(0.5, len(elbo) + 0.5)
        axes.set_ylabel(what)
        axes.ticklabel_format(useOffset=False, style="plain")
        _count_rounds(axes, narrow)
        axes.grid(axis="y", color=COLORS["rule"], linewidth=0.6)

    return _in_both(draw, name="bound", words=words, height=2.7)


def _count_rounds(axes, narrow):
    axes.set_xlabel("round")
    axes.locator_params(axis="x", integer=True, nbins=4 if narrow else 9)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def is_cut(elbo: np.ndarray) -> bool:
    """Whether the picture leaves out rounds that lie far below the others."""
    known = elbo[np.isfinite(elbo)]
    return bool(len(known) and known.min() < _window(known)[0])


def _window(values):
    top, bottom = values.max(), values.min()
    late = values[len(values) // 2 :]
    spread = max(top - np.quantile(late, 0.02), 1e-9, 1e-6 * abs(top))
    low = max(bottom, top - 8 * spread)
    room = 0.06 * (top - low) or 0.5
    return low - room, top + room


def participation(present: pd.DataFrame) -> Html:
    """Who took part when: a line for each silo, dark where it did; of many rounds the share of a bin."""
    table = present.iloc[:, :MOST_SILOS].to_numpy(float).T
    edges = np.linspace(0, len(present), min(len(present), BINS) + 1).astype(int)
    share = np.add.reduceat(table, edges[:-1], axis=1) / np.diff(edges)
    names = list(present.columns[:MOST_SILOS])
    image = np.zeros((*share.shape, 4))
    image[..., :3], image[..., 3] = RGB, share
    words = f"Participation of {len(names)} silos over {len(present):,} rounds, with the share of rounds of each."

    def draw(axes, narrow):
        extent = (0.5, len(present) + 0.5, len(names) - 0.5, -0.5)
        axes.imshow(image, aspect="auto", interpolation="none", extent=extent)
        axes.set_yticks(range(len(names)), _labels(names, 12 if narrow else 28), fontsize=9)
        _count_rounds(axes, narrow)
        axes.tick_params(left=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        for line in np.arange(0.5, len(names) - 1):
            axes.axhline(line, color=COLORS["rule"], linewidth=0.6)
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(names)), [f"{100 * part:.0f}%" for part in table.mean(1)], fontsize=9)
        right.tick_params(right=False)
        right.spines["right"].set_visible(False)

    return _in_both(draw, name="participation", words=words, height=0.85 + 0.2 * len(names))


def forest(rows: pd.DataFrame, *, name: str, what: str, left_out: int = 0) -> Html:
    """Means and intervals, one line each, sorted.

    Args:
        rows: Columns mean, low and high; the index names the lines.
        name: Of the picture on its page.
        what: The site.
        left_out: So many lines are missing in the middle.
    """
    places, middle = np.arange(len(rows)), len(rows) / 2
    places = places + np.where(left_out and places >= middle, 1, 0)
    low, high, mean = (rows[column].to_numpy(float) for column in ("low", "high", "mean"))
    many = len(rows) > 20

    def draw(axes, narrow):
        if low.min() < 0 < high.max():
            axes.axvline(0, color=COLORS["muted"], linewidth=0.8)
        axes.hlines(places, low, high, color=COLORS["accent"], linewidth=1.2)
        axes.plot(mean, places, "o", color=COLORS["accent"], markersize=3.2)
        axes.set_yticks(places, _labels(rows.index, 14 if narrow else 28), fontsize=7.5 if many else 9)
        axes.set_ylim(places[-1] + 0.6, -0.6)
        if left_out:
            axes.axhline(middle, color=COLORS["muted"], linewidth=0.8, linestyle=(0, (2, 3)))
        axes.tick_params(left=False, top=many, labeltop=many)
        axes.locator_params(axis="x", nbins=5 if narrow else 9)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(_short(what, 30 if narrow else 60))
        axes.grid(axis="x", color=COLORS["rule"], linewidth=0.5)
        axes.set_axisbelow(True)

    words = f"Means and 95% intervals of {what}; the table below has the numbers."
    return _in_both(draw, name=name, words=words, height=0.8 + 0.17 * max(2, len(rows) + bool(left_out)))


def density(draws: np.ndarray, *, width: int = 150, height: int = 30) -> Html:
    """A small picture of a marginal: its density, the 95% interval filled, a line at zero if that is near."""
    draws = draws[np.isfinite(draws)]
    if len(draws) < 2 or np.ptp(draws) <= 1e-12 * max(1.0, float(np.abs(draws).max())):
        return tag("span", "constant")
    low, high = np.quantile(draws, [0.025, 0.975])
    start, end = np.quantile(draws, [0.002, 0.998])
    room = 0.06 * (end - start)
    grid = np.linspace(start - room, end + room, 60)
    heights = gaussian_kde(draws[:2000])(grid)
    x = (grid - grid[0]) / (grid[-1] - grid[0]) * width
    y = height - 2 - heights / heights.max() * (height - 5)
    inside = (grid >= low) & (grid <= high)
    line = "M" + " L".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    area = f"M{x[inside][0]:.1f},{height - 2} L" + " L".join(
        f"{a:.1f},{b:.1f}" for a, b in zip(x[inside], y[inside], strict=True)
    )
    parts = [
        tag("path", d=f"{area} L{x[inside][-1]:.1f},{height - 2} Z", fill="var(--soft)"),
        tag("path", d=line, fill="none", stroke="var(--accent)", stroke_width=1.2),
        tag("path", d=f"M0,{height - 2} H{width}", stroke="var(--rule)", stroke_width=1),
    ]
    if grid[0] < 0 < grid[-1]:
        zero = -grid[0] / (grid[-1] - grid[0]) * width
        parts.append(tag("path", d=f"M{zero:.1f},0 V{height}", stroke="var(--muted)", stroke_dasharray="2 2"))
    words = f"Density with most of its mass between {number(low)} and {number(high)}"
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    return tag("svg", parts, role="img", aria_label=words, **size)


def _labels(names, most):
    """Names for an axis; where one is too long, what all begin with is left out first."""
    names = [str(name) for name in names]
    if len(names) > 1 and max(map(len, names)) > most:
        pairs = zip(min(names), max(names), strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        names = [f"…{name[common:]}" for name in names] if common > 1 else names
    return [_short(name, most) for name in names]


def _short(text, most=28):
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split()) or "?"
    return text if len(text) <= most else f"{text[: most - 1]}…"
