"""The picture of a model: what is shared lies at the server, what stays in a box for each silo program."""

import math

from ..model.graph import ModelGraph, Node, SiloGraph
from ..model.wording import Wording
from .html import NOTHING, Html, count, listed, more, table, tag
from .layout import MOST_PROGRAMS, Drawn, Picture, lay_out, shortened, subtitle

MARGIN, STEPS = 3.0, 24
BENDS = [0.0, *(sign * size for size in (30.0, 60.0, 95.0, 135.0, 180.0) for sign in (1, -1))]
KINDS = {
    ("server", "latent"): "global latent",
    ("server", "parameter"): "parameter θ",
    ("server", "factor"): "factor",
    ("silo", "latent"): "local latent",
    ("silo", "observed"): "observed",
    ("silo", "factor"): "factor",
    ("silo", "parameter"): "parameter θ",
}
MOST_ROWS = 60


def in_words(graph: ModelGraph, wording: Wording) -> ModelGraph:
    """The graph with its sites and distributions called as people call them."""

    def told(node):
        distribution = wording.distributions.get(node.name, node.distribution)
        parents = tuple(map(wording.name, node.parents))
        return node._replace(name=wording.name(node.name), distribution=distribution, parents=parents)

    programs = (program._replace(nodes=tuple(map(told, program.nodes))) for program in graph.programs)
    return ModelGraph(tuple(map(told, graph.population)), tuple(programs))


def drawing(graph: ModelGraph) -> Html:
    """The graph as a picture."""
    picture = lay_out(graph, [_box_label(program, graph) for program in graph.programs[:MOST_PROGRAMS]])
    named = [node.name for node in graph.population if node.kind == "latent"]
    shared = listed(named) or "no latent, only parameters"
    words = f"The model: the server holds {shared}; each silo keeps its own latents and observations."
    edge = max(picture.width, 10) + 2 * MARGIN, picture.height + 2 * MARGIN
    return tag(
        "svg",
        tag("title", words),
        _marker(),
        [_box(box) for box in picture.boxes],
        [_edge(picture, *pair) for pair in picture.edges],
        [_label(box) for box in picture.boxes],
        [_site(site) for site in picture.sites],
        viewBox=f"{-MARGIN:g} {-MARGIN:g} {edge[0]:.0f} {edge[1]:.0f}",
        width=f"{edge[0]:.0f}",
        height=f"{edge[1]:.0f}",
        role="img",
    )


def sites_table(graph: ModelGraph) -> Html:
    """The same as a table."""
    rows = [_row(node, "server", "server") for node in graph.population]
    for program in graph.programs:
        where = (
            "every silo"
            if len(graph.programs) == 1
            else f"{'silo' if len(program.silos) == 1 else 'silos'} {listed(program.silos, most=3)}"
        )
        rows += [_row(node, "silo", where) for node in program.nodes]
    left_out = len(rows) - MOST_ROWS
    caption = "Sites of the model." + (f" The first {MOST_ROWS}; {more(left_out)}" if left_out > 0 else "")
    head = ["site", "kind", "where", "distribution", "plates", "depends directly on"]
    return table(head, rows[:MOST_ROWS], caption=caption)


def _row(node: Node, place: str, where: str):
    parameter = node.kind == "parameter"
    return [
        tag("code", node.name),
        KINDS[place, node.kind],
        "shared by all" if parameter else where,
        node.distribution or NOTHING,
        ", ".join(node.plates) or NOTHING,
        ", ".join(node.parents) or (NOTHING if not parameter else "learned"),
    ]


def _box_label(program: SiloGraph, graph: ModelGraph):
    if len(graph.programs) == 1:
        return f"silo j · stays there ({count(len(program.silos), 'silo')})"
    names = listed([shortened(name) for name in program.silos], most=2)
    return f"{'silo' if len(program.silos) == 1 else 'silos'} {names} · stays there"


def _marker():
    arrow = tag("path", d="M0,0 L7,3 L0,6 Z", fill="var(--muted)")
    made = tag("marker", arrow, id="graph-arrow", markerWidth=7, markerHeight=6, refX=6, refY=3, orient="auto")
    return tag("defs", made)


def _box(box):
    style = {
        "server": {"fill": "var(--panel)", "stroke": "var(--accent)", "stroke_width": 1.4},
        "silo": {"fill": "none", "stroke": "var(--bad)", "stroke_width": 1.4, "stroke_dasharray": "5 4"},
        "plate": {"fill": "none", "stroke": "var(--muted)", "stroke_width": 1},
    }[box.kind]
    return tag("rect", x=_n(box.x), y=_n(box.y), width=_n(box.width), height=_n(box.height), rx=6, **style)


def _place(box):
    """Where a box's label begins: at the top of the server's box, at the foot of the others: edges come from above."""
    return box.x + 11, box.y + 19 if box.kind == "server" else box.y + box.height - 9


def _covers(box, point, margin):
    """Whether a point lies on the label of a box."""
    (x, y), long = _place(box), 6.2 * len(shortened(box.label) if box.kind == "plate" else box.label)
    return x - margin < point[0] < x + long + margin and y - 11 - margin < point[1] < y + 3 + margin


def _label(box):
    color = {"server": "var(--accent)", "silo": "var(--bad)", "plate": "var(--muted)"}[box.kind]
    x, y = _place(box)
    shown = shortened(box.label) if box.kind == "plate" else box.label
    halo = {"stroke": "var(--panel)" if box.kind == "server" else "var(--paper)", "stroke_width": 4}
    size = 11 if box.kind == "plate" else 12
    place = {"x": _n(x), "y": _n(y), "font_size": size, "paint_order": "stroke"}
    return tag("text", shown, tag("title", box.label), fill=color, **halo, **place)


def _site(site: Drawn):
    node = site.node
    left, top = site.x - site.width / 2, site.y - site.height / 2
    shape = {"x": _n(left), "y": _n(top), "width": _n(site.width), "height": _n(site.height)}
    whole = tag("title", f"{node.name}: {node.kind} {subtitle(node)}")
    if node.kind == "factor":
        name = tag(
            "text", shortened(node.name), x=_n(left + site.width + 5), y=_n(site.y + 4), font_size=11, fill="var(--ink)"
        )
        return tag("g", whole, tag("rect", fill="var(--ink)", **shape), name)
    fill = {"observed": "var(--rule)", "parameter": "none"}.get(node.kind, "var(--paper)")
    corner = 3 if node.kind == "parameter" else _n(site.height / 2)
    outline = tag("rect", rx=corner, fill=fill, stroke="var(--ink)", stroke_width=1.2, **shape)
    middle = {"x": _n(site.x), "text_anchor": "middle"}
    below = subtitle(node)
    name = tag(
        "text", shortened(node.name), y=_n(site.y + (-2 if below else 4.5)), font_size=13, fill="var(--ink)", **middle
    )
    small = tag("text", below, y=_n(site.y + 12), font_size=10, fill="var(--muted)", **middle) if below else Html("")
    return tag("g", whole, outline, name, small)


def _edge(picture: Picture, start, end):
    """A curve from parent to child, bent as little as keeps it off other sites and labels."""
    sites = {site.id: site for site in picture.sites}
    a, b = sites[start], sites[end]
    others = [site for key, site in sites.items() if key not in (start, end)]
    best = min(BENDS, key=lambda bend: (_hits(_curve(a, b, bend), others, picture), abs(bend)))
    curve = _curve(a, b, best)
    times = [i / 200 for i in range(201)]
    outside = [t for t in times if not _inside(_point(curve, t), a, 1.0) and not _inside(_point(curve, t), b, 2.0)]
    if len(outside) < 2:
        return Html("")
    first, last = outside[0], outside[-1]
    points = [_blossom(curve, s, t) for s, t in ((first, first), (first, last), (last, last))]
    (x0, y0), (x1, y1), (x2, y2) = points
    path = f"M{x0:.1f},{y0:.1f} Q{x1:.1f},{y1:.1f} {x2:.1f},{y2:.1f}"
    arrow = {"marker-end": "url(#graph-arrow)"}
    return tag("path", d=path, fill="none", stroke="var(--muted)", stroke_width=1.1, **arrow)


def _curve(a, b, bend):
    """Two ends and the point between them that pulls it aside."""
    dx, dy = b.x - a.x, b.y - a.y
    length = math.hypot(dx, dy) or 1.0
    middle = ((a.x + b.x) / 2 - 2 * bend * dy / length, (a.y + b.y) / 2 + 2 * bend * dx / length)
    return (a.x, a.y), middle, (b.x, b.y)


def _blossom(curve, s, t):
    weights = (1 - s) * (1 - t), (1 - s) * t + (1 - t) * s, s * t
    return tuple(sum(w * point[axis] for w, point in zip(weights, curve, strict=True)) for axis in (0, 1))


def _point(curve, t):
    return _blossom(curve, t, t)


def _inside(point, site, margin):
    """Whether a point lies in a site's shape, which has round ends."""
    across, along = site.height / 2, max(0.0, site.width / 2 - site.height / 2)
    dx = max(0.0, abs(point[0] - site.x) - along)
    return math.hypot(dx, point[1] - site.y) < across + margin


def _hits(curve, others, picture):
    """How many sites a curve runs over, and then how many labels; leaving the picture counts as a site."""
    points = [_point(curve, i / STEPS) for i in range(1, STEPS)]
    leaves = any(not 2 < x < picture.width - 2 for x, _ in points)
    sites = leaves + sum(any(_inside(point, site, 4.0) for point in points) for site in others)
    return sites, sum(any(_covers(box, point, 3.0) for point in points) for box in picture.boxes)


def _n(value):
    return f"{value:.1f}"
