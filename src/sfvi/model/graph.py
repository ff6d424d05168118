"""Who depends on whom: the sites of both programs as a graph, which holds names and no number of any silo."""

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.handlers import seed, substitute, trace

from .. import _jaxpr
from .observed import is_observed
from .programs import SiloData

if TYPE_CHECKING:
    from .structured import StructuredModel


class Node(NamedTuple):
    """A site.

    Attributes:
        name: Its name.
        kind: "latent", "observed", "factor" (of `numpyro.factor`) or "parameter" (an entry of theta).
        distribution: The name of its distribution; empty for factors and parameters.
        shape: Of its value at the server; None in silos, where it would tell of their size.
        plates: Those around it, outermost first.
        parents: Latents and parameters that it is computed from, others in between left out.
    """

    name: str
    kind: str
    distribution: str
    shape: tuple[int, ...] | None
    plates: tuple[str, ...]
    parents: tuple[str, ...]


class SiloGraph(NamedTuple):
    """The sites of one silo program, and the silos that have it; parents may be sites of the population program."""

    silos: tuple[str, ...]
    nodes: tuple[Node, ...]


class ModelGraph(NamedTuple):
    """The sites of the population program, and those of each silo program that is known."""

    population: tuple[Node, ...]
    programs: tuple[SiloGraph, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "population": [list(node) for node in self.population],
            "programs": [[list(program.silos), [list(node) for node in program.nodes]] for program in self.programs],
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "ModelGraph":
        """From plain values."""
        programs = (SiloGraph(tuple(silos), tuple(map(_node, nodes))) for silos, nodes in plain["programs"])
        return cls(tuple(map(_node, plain["population"])), tuple(programs))


def model_graph(model: "StructuredModel", silos: Mapping[str, SiloData]) -> ModelGraph:
    """Read off what depends on what; of silos that have the same sites one is looked at.

    Args:
        model: The model.
        silos: The silos whose programs are looked at; their names are kept and nothing else of them.
    """
    population = model.population
    shared = _nodes(lambda _: population.program(), {}, shapes=True)
    names = {node.name for node in shared}
    alike: dict[Any, list[str]] = {}
    for name, silo in silos.items():
        alike.setdefault((id(silo.program.program), silo.program.signature), []).append(name)
    found: dict[tuple[Node, ...], list[str]] = {}
    for members in alike.values():
        silo = silos[members[0]]
        program, rebuild = silo.program.program, silo.program.rebuild

        def both(values, program=program, rebuild=rebuild):
            return program(population.program(), rebuild(values))

        nodes = tuple(node for node in _nodes(both, silo.values, shapes=False) if node.name not in names)
        found.setdefault(nodes, []).extend(members)
    return ModelGraph(shared, tuple(SiloGraph(tuple(members), nodes) for nodes, members in found.items()))


def _nodes(program: Callable, values: dict, *, shapes: bool) -> tuple[Node, ...]:
    recorded = _abstract(program, values)
    given = {name: site["value"] for name, site in recorded.items() if _is_given(site)}
    asked = [name for name, site in recorded.items() if site["type"] == "sample"]
    used = dict(zip(asked, _parents(program, values, given, asked), strict=True))
    return tuple(
        Node(
            name,
            _kind(site),
            _distribution(site),
            tuple(jnp.shape(site["value"])) if shapes and site["type"] == "sample" else None,
            tuple(frame.name for frame in reversed(site["cond_indep_stack"])) if site["type"] == "sample" else (),
            tuple(parent for parent in used.get(name, ()) if parent != name),
        )
        for name, site in recorded.items()
        if site["type"] == "param" or name in used
    )


def _parents(program, values, given, asked):
    """For each site asked for, those of the given ones that lead to its log density with no other one between."""

    def terms(given):
        def chosen(site):
            return _step_of(site, given[site["name"]]) if site["name"] in given else None

        recorded = _traced(substitute(program, substitute_fn=chosen), jax.random.key(0), values)
        return [recorded[name]["fn"].log_prob(recorded[name]["value"]) for name in asked]

    leaves, tree = jax.tree.flatten(given)
    owners = jax.tree.leaves({name: jax.tree.map(lambda _, n=name: n, value) for name, value in given.items()})
    if not asked or not leaves:
        return [()] * len(asked)
    used = _jaxpr.dependence(lambda *leaves: terms(jax.tree.unflatten(tree, leaves)), *leaves)
    return [tuple(dict.fromkeys(n for n, hit in zip(owners, hits, strict=True) if hit)) for hits in used]


def _abstract(program, values):
    """The trace of a program that draws everything by itself, with shapes in the place of numbers."""
    found = []

    def run(key, values):
        recorded = _traced(program, key, values)
        found.append(recorded)
        return {name: site["value"] for name, site in recorded.items() if _is_given(site)}

    shapes = jax.eval_shape(run, jax.random.key(0), values)
    return {name: {**site, "value": shapes.get(name, site["value"])} for name, site in found[0].items()}


def _traced(program, key, values):
    def members(site):
        """All members of a plate whose `subsample_size` exceeds its size; drawn ones otherwise."""
        if site["type"] != "plate":
            return None
        size, drawn = site["args"]
        return jnp.arange(size if drawn is None else min(drawn, size))

    with trace() as recorded, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subsample_size does not match")
        substitute(seed(program, key), substitute_fn=members)(values)
    return recorded


def _step_of(site, value):
    """Inside a scan a site takes its own time step."""
    step = site.get("infer", {}).get("_scan_current_index")
    inside = step is not None and jnp.ndim(value) > len(site["fn"].shape())
    return value[step] if inside else value


def _is_given(site):
    """Latents and parameters: what others depend on."""
    return site["type"] == "param" or (site["type"] == "sample" and not site["is_observed"])


def _kind(site):
    if site["type"] == "param":
        return "parameter"
    if not site["is_observed"]:
        return "latent"
    return "observed" if is_observed(site) else "factor"


def _distribution(site):
    if site["type"] == "param" or _kind(site) == "factor":
        return ""
    fn = site["fn"]
    while hasattr(fn, "base_dist") and type(fn).__name__ in (
        "Independent",
        "ExpandedDistribution",
        "MaskedDistribution",
    ):
        fn = fn.base_dist
    return type(fn).__name__


def _node(plain):
    name, kind, distribution, shape, plates, parents = plain
    return Node(name, kind, distribution, None if shape is None else tuple(shape), tuple(plates), tuple(parents))
