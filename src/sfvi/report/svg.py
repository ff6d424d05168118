"""Figures of matplotlib as SVG inside a page: its colors follow the page's, its text is text, its ids are its own."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .html import Html, tag

# Colors that stand for the page's own, which are put in their place.
COLORS = {
    "ink": "#010101",
    "muted": "#020202",
    "rule": "#030303",
    "accent": "#040404",
    "soft": "#050505",
    "bad": "#060606",
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sfvi",
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.parse_math": False,  # names may hold dollars
    "axes.unicode_minus": True,
    "axes.edgecolor": COLORS["muted"],
    "axes.labelcolor": COLORS["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["muted"],
    "ytick.color": COLORS["muted"],
    "xtick.labelcolor": COLORS["ink"],
    "ytick.labelcolor": COLORS["ink"],
    "path.simplify": True,
}


@contextmanager
def canvas(width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """A figure of so many inches with one pair of axes, which no setting of the user's changes."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot(facecolor="none")
        yield figure, axes


def inline(figure: Any, *, name: str, words: str) -> Html:
    """The figure as an element of a page.

    Args:
        figure: Of `canvas`, which must still be open.
        name: Begins the ids of what refers to something, so that no two pictures of a page share one.
        words: What it shows, for those who cannot see it.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the reader's browser has others
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<style [^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL).replace("xlink:href", "href")
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', body))
    wanted = {one or other for one, other in used}

    def own(match):
        return f' id="{name}-{match[1]}"' if match[1] in wanted else ""

    body = re.sub(r' id="([^"]*)"', own, body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)
    for color, code in COLORS.items():
        body = body.replace(code, f"var(--{color})")
    body = re.sub(r"\s*\n\s*", " ", body)
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    points = f"0 0 {72 * width / 96:g} {72 * height / 96:g}"
    common = "stroke-linejoin: round; stroke-linecap: butt"  # what the style that was taken out had said
    drawn = tag("g", Html(body), style=common)
    return tag("svg", tag("title", words), drawn, viewBox=points, width=width, height=height, role="img")
