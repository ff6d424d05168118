"""How a model is told of to people, where the names of its sites are of the machinery."""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from .layout import FlatLayout, Site


class Wording(NamedTuple):
    """Words for reports and diagnoses; the names that programs, draws and files use stay what they are.

    Attributes:
        title: What was fitted, in a line; empty for the names of the global latents.
        names: What a site, or an array of a silo's data, is called.
        labelled: Sites whose coordinates are called by their labels alone, `age` and not `beta[age]`.
        hidden: Sites and arrays that say the same as others, or nothing to a reader.
        distributions: What the distribution of a site is called.
        before: What silos told before the first round, beyond the number of their units; a sentence each.
        note: What to know about the numbers of sites and arrays; empty for nothing.
    """

    title: str = ""
    names: Mapping[str, str] = {}
    labelled: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()
    distributions: Mapping[str, str] = {}
    before: tuple[str, ...] = ()
    note: str = ""

    def name(self, site: str) -> str:
        """What a site is called."""
        return self.names.get(site, site)

    def coordinate(self, site: str, labels: tuple[str, ...]) -> str:
        """What one coordinate of a site is called, like `beta[smoke]`."""
        if site in self.labelled and labels:
            return ", ".join(labels)
        return f"{self.name(site)}[{', '.join(labels)}]" if labels else self.name(site)


def free_labels(
    layout: FlatLayout, dims: Mapping[str, list[str]], coords: Mapping[str, list], wording: Wording
) -> list[str]:
    """Names for all coordinates of unconstrained latents: by the user's labels where a site has as many.

    Args:
        layout: Of the latents.
        dims: Names of the sites' dimensions beyond plates.
        coords: Labels along dimensions and plates.
        wording: What sites are called.
    """
    return [name for site in layout.sites for name in _of_site(site, dims, coords, wording)]


def _of_site(site: Site, dims, coords, wording):
    axes = [[str(i) for i in range(site.free_size)]] if site.shape else []
    if site.shape == site.free_shape:
        plates = {frame.dim + site.batch_ndim: frame.name for frame in site.frames}
        rest = iter(dims.get(site.name, ()))
        axes = []
        for axis, size in enumerate(site.shape):
            dim = plates.get(axis) or next(rest, "")
            given = coords.get(dim, ())
            axes.append([str(label) for label in given] if len(given) == size else [str(i) for i in range(size)])
    return [wording.coordinate(site.name, labels) for labels in itertools.product(*axes)]
