"""Where the sites of a model's graph are drawn: boxes in boxes, children below their parents."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..model.graph import ModelGraph, Node

HEIGHT, GAP, ROW_GAP, PAD, HEADER = 42.0, 18.0, 34.0, 16.0, 22.0
WIDEST, SERVER_TO_SILOS = 740.0, 44.0
MOST_PROGRAMS = 3
MANY = 20  # sites of one program beyond which those that are alike are drawn as one
LONGEST = 20  # letters of a name


class Drawn(NamedTuple):
    """A site in the picture: which it is, its node, and the middle and size of its shape."""

    id: tuple[int, str]
    node: Node
    x: float
    y: float
    width: float
    height: float


class Box(NamedTuple):
    """A box in the picture: its kind ("server", "silo" or "plate"), its label, and where it lies."""

    kind: str
    label: str
    x: float
    y: float
    width: float
    height: float


class Picture(NamedTuple):
    """A graph that has been laid out; edges lead from one site's id to another's."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    sites: tuple[Drawn, ...]
    edges: tuple[tuple[tuple[int, str], tuple[int, str]], ...]


class _Leaf(NamedTuple):
    id: tuple[int, str]
    node: Node


class _Group(NamedTuple):
    kind: str
    label: str
    children: list


class _Laid(NamedTuple):
    """Something laid out around its own upper left corner."""

    width: float
    height: float
    boxes: list[Box]
    sites: list[Drawn]

    def moved(self, x, y):
        boxes = [box._replace(x=box.x + x, y=box.y + y) for box in self.boxes]
        sites = [site._replace(x=site.x + x, y=site.y + y) for site in self.sites]
        return boxes, sites


def lay_out(graph: ModelGraph, labels: Sequence[str]) -> Picture:
    """Place the server's sites above those of each silo program.

    Args:
        graph: The model's.
        labels: Of the silo boxes, one for each program that is drawn.
    """
    programs = graph.programs[: len(labels)]
    parameters = {node.name: node for program in programs for node in program.nodes if node.kind == "parameter"}
    known = {node.name for node in graph.population}
    server = [*graph.population, *(node for name, node in parameters.items() if name not in known)]
    own = [[node for node in program.nodes if node.kind != "parameter"] for program in programs]
    parts = [server, *own]
    drawn = _merge_alike(parts) if max(map(len, parts)) > MANY else parts
    shared = {node.name for node in drawn[0]}
    edges = []
    for part, nodes in enumerate(drawn):
        mine = {node.name for node in nodes}
        for node in nodes:
            edges += [((part if p in mine else 0, p), (part, node.name)) for p in node.parents if p in mine | shared]
    groups = [_group("server", "server · shared", drawn[0], 0)]
    groups += [
        _group("silo", label, nodes, i + 1) for i, (label, nodes) in enumerate(zip(labels, drawn[1:], strict=True))
    ]
    places: dict[tuple[int, str], float] = {}
    boxes, sites, width, height = [], [], 0.0, 0.0
    for _ in range(3):  # each time with the places of the time before, so that edges cross less
        boxes, sites, width, height = _whole(groups, edges, places)
        places = {site.id: site.x for site in sites}
    return Picture(width, height, tuple(boxes), tuple(sites), tuple(edges))


def size_of(node: Node) -> tuple[float, float]:
    """Width and height of a site's shape."""
    if node.kind == "factor":
        return 14.0, 14.0
    letters = max(7.4 * len(shortened(node.name)), 5.8 * len(subtitle(node)))
    return max(HEIGHT, letters + 24.0), HEIGHT


def subtitle(node: Node) -> str:
    """What stands below a site's name: its distribution, and at the server its shape."""
    if node.kind == "parameter":
        return "learned"
    shape = "" if not node.shape else " " + "×".join(map(str, node.shape))
    return node.distribution + shape


def shortened(name: str) -> str:
    """A name that fits into a shape."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _group(kind, label, nodes, part):
    """Sites by the plates around them; a plate that several sites are in is drawn outside those that few are in."""
    members: dict[str, int] = {}
    for node in nodes:
        for plate in node.plates:
            members[plate] = members.get(plate, 0) + 1
    top = _Group(kind, label, [])
    for node in nodes:
        group = top
        for plate in sorted(node.plates, key=lambda p: -members[p]):
            inner = next((c for c in group.children if isinstance(c, _Group) and c.label == plate), None)
            if inner is None:
                inner = _Group("plate", plate, [])
                group.children.append(inner)
            group = inner
        group.children.append(_Leaf((part, node.name), node))
    return top


def _whole(groups, edges, places):
    count = max(1, len(groups) - 1)
    limits = [WIDEST, *[(WIDEST - GAP * (count - 1)) / count] * count]
    laid = [_arranged(group, edges, places, limit) for group, limit in zip(groups, limits, strict=False)]
    silos = laid[1:]
    below = sum(part.width for part in silos) + GAP * max(0, len(silos) - 1)
    width = max(laid[0].width, below)
    boxes, sites = laid[0].moved((width - laid[0].width) / 2, 0.0)
    height, x, y = laid[0].height, (width - below) / 2, laid[0].height + SERVER_TO_SILOS
    for part in silos:
        more, nodes = part.moved(x, y)
        boxes, sites = boxes + more, sites + nodes
        x, height = x + part.width + GAP, max(height, y + part.height)
    return boxes, sites, width, height


def _arranged(item, edges, places, limit) -> _Laid:
    """Lay out a site, or a box with all that is in it."""
    if isinstance(item, _Leaf):
        width, height = size_of(item.node)
        room = max(height, HEIGHT)
        label = 7.4 * len(shortened(item.node.name)) + 8 if item.node.kind == "factor" else 0.0
        return _Laid(
            width + 2 * label, room, [], [Drawn(item.id, item.node, width / 2 + label, room / 2, width, height)]
        )
    label = item.label if item.kind != "plate" else shortened(item.label)
    boxes, sites, widest = (
        [],
        [],
        6.6 * len(label) + (PAD if item.kind != "plate" else 3 * PAD),
    )  # edges pass beside a label
    y, foot = (PAD + HEADER, PAD) if item.kind == "server" else (PAD, PAD + HEADER)
    rows = []
    for row in _rows(item.children, edges):
        row = sorted(row, key=lambda child: _pull(child, edges, places)) if places else row
        rows += _wrapped([_arranged(child, edges, places, limit - 2 * PAD) for child in row], limit - 2 * PAD)
    widths = [sum(part.width for part in row) + GAP * (len(row) - 1) for row in rows]
    inner = max([*widths, widest - 2 * PAD, HEIGHT])
    for row, width in zip(rows, widths, strict=True):
        x, tallest = PAD + (inner - width) / 2, max(part.height for part in row)
        for part in row:
            more, nodes = part.moved(x, y + (tallest - part.height) / 2)
            boxes, sites, x = boxes + more, sites + nodes, x + part.width + GAP
        y += tallest + ROW_GAP
    height = (y - ROW_GAP if rows else y) + foot
    return _Laid(inner + 2 * PAD, height, [Box(item.kind, item.label, 0, 0, inner + 2 * PAD, height), *boxes], sites)


def _rows(children, edges):
    """Children of a box by rank: below all earlier ones that they depend on."""
    inside = [{leaf.id for leaf in _leaves(child)} for child in children]
    ranks: list[int] = []
    for position, mine in enumerate(inside):
        above = [ranks[other] for other in range(position) if any(a in inside[other] and b in mine for a, b in edges)]
        ranks.append(max(above, default=-1) + 1)
    return [[c for c, r in zip(children, ranks, strict=True) if r == rank] for rank in sorted(set(ranks))]


def _wrapped(row, limit):
    """Cut a row into several that are not too wide."""
    lines, width = [[]], 0.0
    for part in row:
        if lines[-1] and width + part.width > limit:
            lines.append([])
            width = 0.0
        lines[-1].append(part)
        width += part.width + GAP
    return [line for line in lines if line]


def _pull(child, edges, places):
    """Where the neighbours of a child are, on average."""
    mine = {leaf.id for leaf in _leaves(child)}
    near = [places[a if b in mine else b] for a, b in edges if (a in mine) != (b in mine)]
    return math.fsum(near) / len(near) if near else sum(places[i] for i in mine) / max(1, len(mine))


def _leaves(item) -> Iterable[_Leaf]:
    if isinstance(item, _Leaf):
        yield item
    else:
        for child in item.children:
            yield from _leaves(child)


def _merge_alike(parts):
    """Sites of the same kind, in the same plates, with the same parents and children, as one: networks have many."""
    children: dict[str, set] = {}
    for part, nodes in enumerate(parts):
        for node in nodes:
            for parent in node.parents:
                children.setdefault(parent, set()).add((part, node.name))
    renamed: dict[str, str] = {}
    merged = []
    for part, nodes in enumerate(parts):
        alike: dict[tuple, list[Node]] = {}
        for node in nodes:
            below = frozenset(children.get(node.name, ()))
            alike.setdefault((node.kind, node.distribution, node.plates, node.parents, below), []).append(node)
        kept = []
        for same in alike.values():
            first = same[0]
            if len(same) > 1:
                name = f"{first.name} +{len(same) - 1}"
                renamed |= {node.name: name for node in same if part == 0 or node.name not in renamed}
                first = first._replace(name=name, shape=None)
            kept.append(first)
        merged.append(kept)
    return [
        [n._replace(parents=tuple(dict.fromkeys(renamed.get(p, p) for p in n.parents))) for n in nodes]
        for nodes in merged
    ]
