"""Which local sites of a program are recentred, and how."""

from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp

from .. import _jaxpr
from ..errors import ModelError
from .centring import (
    NUMBERS,
    Centred,
    Centring,
    auxiliary_name,
    choice_of,
    location_and_scale,
    parameter_name,
    recentre,
)
from .layout import Site
from .tracing import Structure, execute, initial_params, inspect


def choose(
    centring: Centring, program: Callable, args: tuple, structure: Structure, sites: Sequence[Site], *, what: str
) -> Centred:
    r"""Find the $c$ of each local site that is not as written.

    "auto" is "learned" for sites whose location or scale depends on a latent or on $\theta$, else "as_written".

    Args:
        centring: What the user asked for.
        program: Both programs in one, as written.
        args: Its arguments.
        structure: What `inspect` found in it.
        sites: The local latents.
        what: Name for messages.
    """
    named = centring if isinstance(centring, dict) else {}
    asked = {site.name: choice_of(centring, site.name) for site in sites}
    automatic = {name for name, choice in asked.items() if choice == "auto" and name not in structure.fixed}
    learned = _dependent(program, args, structure, automatic) if automatic else set()
    centred: Centred = {}
    for name, choice in asked.items():
        if choice == "auto":
            choice = "learned" if name in learned else "as_written"
        number = NUMBERS[choice] if isinstance(choice, str) else choice
        if number == 1.0:
            continue
        if name not in structure.fixed:
            centred[name] = number
        elif name in named:
            raise _cannot(what, name, structure.fixed[name])
    _check_names(centred, structure, what)
    return _that_work(centred, named, program, args, sites, what)


def _that_work(centred, named, program, args, sites, what):
    """Leave as written what a handler inside the program, such as `scope`, gives another name."""
    if not centred:
        return centred
    found = {site.name: site for site in inspect(recentre(program, centred), args, what=what).latents}
    working = {}
    for site in sites:
        if site.name not in centred:
            continue
        new = found.get(auxiliary_name(site.name))
        if new is not None and (new.shape, new.frames) == (site.shape, site.frames):
            working[site.name] = centred[site.name]
        elif site.name in named:
            raise _cannot(what, site.name, "a handler of the program renames or replaces")
    return working


def _cannot(what, name, reason):
    return ModelError(f"{what} has the latent {name!r}, which {reason}; it stays as written: leave it out of centring.")


def _check_names(centred, structure, what):
    for name, number in centred.items():
        needed = [auxiliary_name(name)] if number is not None else [auxiliary_name(name), parameter_name(name)]
        for other in needed:
            if other in structure.names:
                raise ModelError(
                    f"{what} has a site {other!r}, a name that centring needs for {name!r}; rename it, or give "
                    f"centring={{{name!r}: 'as_written'}}."
                )


def _dependent(program: Callable, args: tuple, structure: Structure, sites: Collection[str]) -> set[str]:
    r"""Those of the sites whose location or scale is computed from a latent or from $\theta$.

    Read off the program that JAX would compile: does anything that leads to a site's location or scale start at a
    latent or at a parameter? Data and constants do not count.
    """
    ordered = sorted(sites)
    indices = {plate.name: jnp.arange(plate.drawn) for plate in structure.plates if plate.drawn < plate.size}
    floating = jnp.result_type(float)
    free = {site.name: jax.ShapeDtypeStruct(site.free_shape, floating) for site in structure.latents}
    theta = jax.eval_shape(lambda key: initial_params(program, key, args), jax.random.key(0))

    def locations_and_scales(free, theta):
        recorded = execute(program, args, free, theta, indices)[1]
        bases = [location_and_scale(recorded[name]["fn"]) for name in ordered]
        return [jnp.stack(jnp.broadcast_arrays(base.loc, base.scale)) for base in bases]

    used = _jaxpr.dependence(locations_and_scales, free, theta)
    return {name for name, inputs in zip(ordered, used, strict=True) if any(inputs)}
