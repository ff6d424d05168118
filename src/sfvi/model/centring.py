r"""Centred or not: by what a local site with a location and a scale is measured inside $q$.

A site $b$ with location $l$ and scale $s$, both of which may depend on other latents and on $\theta$, is replaced by

$$\tilde b = c\,l + s^{c - 1} (b - l), \qquad \tilde b \sim p(\,\cdot\,; c\,l, s^c)$$

(Gorinova et al. 2019, as NumPyro's `LocScaleReparam` has it). $c = 1$ is the site as written, "centred"; $c = 0$ is
$b = l + s \tilde b$, "non-centred". The model, its evidence and the meaning of $b$ stay the same; what changes is that
the family's Gaussians are now Gaussians of $\tilde b$. So a bound may be maximized in $c$ as well: a learned $c$ is an
entry of $\theta$, shared by all silos.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions import constraints
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam

from ..errors import OptionError

CHOICES = ("as_written", "non_centred", "learned", "auto")
DEFAULT = "as_written"
# Where a learned c starts. The more the data say of each b, the more of q has to follow a change of c, and the slower c
# is: so it must start near 1, where it then belongs. Where data say little it moves freely.
START = 0.98
NUMBERS = {"as_written": 1.0, "non_centred": 0.0, "learned": None}
# Families of locations and scales, with the parameters that are neither.
LOCATION_SCALE = {
    dist.Normal: (),
    dist.StudentT: ("df",),
    dist.Laplace: (),
    dist.SoftLaplace: (),
    dist.Cauchy: (),
    dist.Logistic: (),
    dist.Gumbel: (),
}
Centring = str | dict[str, str | float]
Centred = dict[str, float | None]  # c of each site that is not as written; None where it is learned


def check_centring(centring: Any) -> Centring:
    """Refuse what is neither a choice nor a mapping from site to a choice or a number in [0, 1]."""
    named = ", ".join(map(repr, CHOICES))
    if isinstance(centring, str) and centring in CHOICES:
        return centring
    if not isinstance(centring, Mapping):
        raise OptionError(f"centring is {centring!r}; choose {named}, or give a mapping from site to one of these.")
    checked: dict[str, str | float] = {}
    for site, choice in centring.items():
        if isinstance(choice, str) and choice in CHOICES:
            checked[site] = choice
        elif isinstance(choice, int | float | np.floating) and not isinstance(choice, bool) and 0 <= choice <= 1:
            checked[site] = float(choice)
        else:
            raise OptionError(f"centring of {site!r} is {choice!r}; choose {named}, or give a number from 0 to 1.")
    return checked


def choice_of(centring: Centring, site: str) -> str | float:
    """What was asked for a site; those that a mapping does not name follow the default."""
    return centring if isinstance(centring, str) else centring.get(site, DEFAULT)


def location_and_scale(fn: dist.Distribution) -> Any:
    """The distribution inside `.expand(...)` and `.to_event(...)` if it has a location and a scale, else None."""
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn if type(fn) in LOCATION_SCALE else None


def auxiliary_name(site: str) -> str:
    r"""Name of the site of $\tilde b$ while the program runs."""
    return f"{site}_decentered"


def parameter_name(site: str) -> str:
    r"""Name of a learned $c$ in $\theta$."""
    return f"{site}_centered"


class Placed(NamedTuple):
    r"""A site's location $l$, scale $s$ and learned $c$."""

    location: Array
    scale: Array
    number: Array

    def slope(self, value: Array) -> Array:
        r"""How far $\tilde b$ would have to move to take $b$ where a growing $c$ takes it.

        $$\frac{\partial b / \partial c}{\partial b / \partial \tilde b} = -\log s\,(\tilde b - c\,l) - l$$
        """
        return -jnp.log(self.scale) * (value - self.number * self.location) - self.location


def recentre(program: Callable, centred: Centred, placed: dict[str, Placed] | None = None) -> Callable:
    r"""The program with each of the sites drawn as $\tilde b$ and computed from it.

    Args:
        program: A NumPyro program.
        centred: The sites.
        placed: Takes down where those with a learned $c$ were, when the program runs.
    """
    if not centred:
        return program

    def configure(message):
        name = message["name"]
        if name not in centred or message["value"] is not None:
            return None
        base = location_and_scale(message["fn"])
        number = centred[name]
        if number is None:
            start = jnp.full(_shape_of_learned(message["fn"], base), START)
            number = numpyro.param(parameter_name(name), start, constraint=constraints.unit_interval)
            if placed is not None:
                placed[name] = Placed(base.loc, base.scale, jnp.asarray(number))
        return LocScaleReparam(number, shape_params=LOCATION_SCALE[type(base)])

    return reparam(program, config=configure)


def _shape_of_learned(fn, base):
    """A number for each element of an event that has a location or scale of its own; members of plates share it."""
    shape = jnp.broadcast_shapes(jnp.shape(base.loc), jnp.shape(base.scale))
    return shape[len(shape) - min(fn.event_dim, len(shape)) :]


def enter(free: dict[str, Any], centred: Centred) -> dict[str, Any]:
    """Name the latents as the program that `recentre` made does."""
    return {auxiliary_name(name) if name in centred else name: value for name, value in free.items()}


def leave(recorded: dict[str, dict], centred: Centred) -> dict[str, dict]:
    r"""A trace of that program with the user's sites only: $b$ has the density of $\tilde b$, and its own value."""
    if not centred:
        return recorded
    auxiliary = {auxiliary_name(name): name for name in centred}
    trace = {}
    for name, site in recorded.items():
        if name in auxiliary:
            own = auxiliary[name]
            trace[own] = {**site, "name": own, "output": recorded[own]["value"]}
        elif name not in centred:
            trace[name] = site
    return trace


def why_fixed(site: dict, ratios: Mapping[str, float]) -> str | None:
    """Why a latent has to stay as written; None if it need not.

    Args:
        site: Its message in a trace.
        ratios: For each plate, members per member drawn.
    """
    if "_scan_current_index" in site["infer"]:
        return "lies in a scan"
    if location_and_scale(site["fn"]) is None:
        names = ", ".join(kind.__name__ for kind in LOCATION_SCALE)
        return f"is no {names}"
    expected = math.prod(ratios.get(frame.name, 1.0) for frame in site["cond_indep_stack"])
    scale = 1.0 if site["scale"] is None else site["scale"]
    if not isinstance(scale, int | float) or not math.isclose(scale, expected):
        return "is scaled by a handler, so that another density than that of a change of variables counts"
    return None
