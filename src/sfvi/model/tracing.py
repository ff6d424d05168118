"""Running a NumPyro program on given latents; with `centring.py` and `graph.py` all that uses effect handlers."""

import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions import constraints
from numpyro.distributions.distribution import Delta, MaskedDistribution
from numpyro.distributions.transforms import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.handlers import seed, substitute, trace

from .. import _jaxpr
from .._types import Indices, Key, Theta
from ..errors import DataError, ModelError, first_line
from .centring import why_fixed
from .layout import Frame, Plate, Site

Trace = dict[str, dict[str, Any]]


class Structure(NamedTuple):
    """What one abstract run tells of a program: latents, observed sites, plates, parameters, factors."""

    latents: tuple[Site, ...]
    observed: tuple[str, ...]
    plates: tuple[Plate, ...]
    params: tuple[str, ...]
    factors: tuple[str, ...]
    frames: dict[str, set[str]]  # plates around each sample site
    names: frozenset[str]  # of everything
    fixed: dict[str, str]  # latents that cannot be recentred, and why


def execute(
    program: Callable, args: tuple, free: dict[str, Array], theta: Theta, indices: Indices
) -> tuple[Any, Trace]:
    """Run the program with its latents at given unconstrained values.

    Each constrained latent adds its log-Jacobian as a factor, once, inside the latent's plates.

    Args:
        program: A NumPyro program.
        args: Its arguments.
        free: Unconstrained values of its latents.
        theta: Unconstrained values of trainable parameters.
        indices: Drawn members of the subsampled plates.

    Returns:
        What the program returns, and its trace.
    """

    def values(site):
        name = site["name"]
        if site["type"] == "sample" and not site["is_observed"] and name in free:
            return _constrain(site, free[name])
        if site["type"] == "param" and name in theta:
            return jax.tree.map(_param_transform(site), theta[name])
        if site["type"] == "plate":
            return indices.get(name, _all_members(site))
        return None

    with trace() as recorded, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subsample_size does not match")
        returned = substitute(program, substitute_fn=values)(*args)
    return returned, recorded


def gaussian_parameters(fn: Any) -> tuple | None:
    """Location and scale of a Normal; location, covariance and its root of a MultivariateNormal; None for others."""
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    if type(fn) is dist.Normal:
        return fn.loc, fn.scale
    if type(fn) is dist.MultivariateNormal:
        return fn.loc, fn.covariance_matrix, fn.scale_tril
    return None


def log_probs(recorded: Trace, weights: dict[str, Array]) -> dict[str, Array]:
    """Log probability of every sample site, elementwise over its plates.

    Args:
        recorded: A trace made by `execute`.
        weights: For some plates, a factor for each member.
    """
    terms = {}
    for name, site in recorded.items():
        if site["type"] != "sample":
            continue
        term = site["fn"].log_prob(site["value"])
        if site["scale"] is not None:
            term = term * jnp.asarray(site["scale"], term.dtype)
        for frame in site["cond_indep_stack"]:
            if frame.name in weights:
                weight = weights[frame.name].astype(term.dtype)
                term = term * weight.reshape(-1, *(1,) * (-frame.dim - 1))
        terms[name] = term
    return terms


def unit_log_probs(
    recorded: Trace, weights: dict[str, Array], scales: dict[str, float], owners: dict[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Log probability by unit: of all that lies in its plate or is owned by it; and of all else.

    Args:
        recorded: A trace made by `execute`.
        weights: For some plates, a factor for each member; those of unit plates are left out.
        scales: For each unit plate, by what the program scales its minibatch up; this is undone.
        owners: For some sites outside the unit plates, the unit of each element, see `owners.py`.
    """
    others = {plate: weight for plate, weight in weights.items() if plate not in scales}
    rest, units, owned = jnp.zeros(()), {}, {}
    for name, term in log_probs(recorded, others).items():
        frame = next((frame for frame in recorded[name]["cond_indep_stack"] if frame.name in scales), None)
        if frame is None and name in owners:
            owned[name] = term
            continue
        if frame is None:
            rest = rest + jnp.sum(term)
            continue
        term = jnp.moveaxis(jnp.broadcast_to(term, _batch_shape(recorded[name], term)), frame.dim, -1)
        summed = jnp.sum(term.reshape(-1, term.shape[-1]), axis=0) / scales[frame.name]
        units[frame.name] = units.get(frame.name, 0.0) + summed
    return _hand_out(rest, {plate: units[plate] for plate in scales}, owned, owners)


def _hand_out(rest, units, owned, owners):
    """Add what units own outside their plates; they are numbered through all plates, and after them comes the rest."""
    if not owned:
        return rest, units
    ends = np.cumsum([term.shape[0] for term in units.values()])
    for name, term in owned.items():
        sums = jax.ops.segment_sum(jnp.ravel(term), jnp.ravel(owners[name]), int(ends[-1]) + 1)
        *parts, free = jnp.split(sums, ends)
        rest = rest + free[0]
        units = {plate: total + part for (plate, total), part in zip(units.items(), parts, strict=True)}
    return rest, units


def _batch_shape(site, term):
    """The full batch shape of a site: a factor may leave out dimensions of its plates."""
    shape = list(jnp.shape(term))
    for frame in site["cond_indep_stack"]:
        shape = [1] * (-frame.dim - len(shape)) + shape
        shape[frame.dim] = max(shape[frame.dim], frame.size)
    return tuple(shape)


def inspect(program: Callable, args: tuple, *, what: str) -> Structure:
    """Run a program abstractly, with no arithmetic on data, and read off its structure.

    Args:
        program: A NumPyro program that needs no randomness but its own sites'.
        args: Its arguments: trees of arrays.
        what: Name for messages.
    """
    found = []

    def run(key, args):
        found.append(_structure(_seeded(program, key, args), what))

    try:
        jax.eval_shape(run, jax.random.key(0), args)
    except ModelError:
        raise
    except DataError as error:  # of a program that looks at its data
        raise DataError(f"{what}: {error}") from error
    except Exception as error:
        twice = re.search(r"`(.*)` duplicated", str(error))
        if twice:
            raise ModelError(
                f"{what} has the site {twice[1]!r} twice, or the population program and it both have it; give one of "
                "them another name."
            ) from error
        raise ModelError(f"{what} fails when run: {first_line(error)}{_names_there(error, args)}.") from error
    return found[0]


def _names_there(error, args):
    """If a name was not found, those that there are."""
    names = [str(name) for arg in args if isinstance(arg, dict) for name in arg]
    return f"; the data have {', '.join(names)}" if isinstance(error, KeyError) and names else ""


def initial_params(program: Callable, key: Key, args: tuple) -> Theta:
    """Unconstrained initial values of the program's `numpyro.param` sites."""

    @jax.jit
    def run(key, args):
        return {
            name: jax.tree.map(_param_transform(site).inv, site["value"])
            for name, site in _seeded(program, key, args).items()
            if site["type"] == "param"
        }

    floating = jnp.result_type(float)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, floating), run(key, args))


def initial_latents(program: Callable, args: tuple, theta: Theta, key: Key, init_loc_fn: Callable) -> dict[str, Array]:
    """Unconstrained values of a program's latents that a NumPyro initialization strategy chooses."""

    def values(site):
        if site["type"] == "param" and site["name"] in theta:
            return jax.tree.map(_param_transform(site), theta[site["name"]])
        return _all_members(site) if site["type"] == "plate" else init_loc_fn(site)

    with trace() as recorded, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subsample_size does not match")
        substitute(seed(program, key), substitute_fn=values)(*args)
    return {
        name: biject_to(site["fn"].support).inv(site["value"])
        for name, site in recorded.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def constrained_params(program: Callable, args: tuple, theta: Theta) -> Theta:
    """Values of the program's `numpyro.param` sites in their own space."""

    @jax.jit
    def run(args, theta):
        def values(site):
            if site["type"] == "param" and site["name"] in theta:
                return jax.tree.map(_param_transform(site), theta[site["name"]])
            return _all_members(site) if site["type"] == "plate" else None

        with trace() as recorded, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "subsample_size does not match")
            substitute(seed(program, jax.random.key(0)), substitute_fn=values)(*args)
        return {name: site["value"] for name, site in recorded.items() if site["type"] == "param"}

    return run(args, theta)


def outputs(recorded: Trace) -> dict[str, Array]:
    """Values of the latent and deterministic sites of a trace."""
    return {name: site.get("output", site["value"]) for name, site in recorded.items() if _is_output(site)}


def output_dims(recorded: Trace) -> dict[str, list[str | None]]:
    """For each output the names of its dimensions: those of plates are known, the others None."""
    return {name: site_dims(site) for name, site in recorded.items() if _is_output(site)}


def site_dims(site: dict[str, Any]) -> list[str | None]:
    """Names of the dimensions of a site's value: those of plates are known, the others None."""
    shape = jnp.shape(site["value"])
    names: list[str | None] = [None] * len(shape)
    for frame in site["cond_indep_stack"]:
        if site["type"] == "sample":
            axis = len(shape) - len(site["fn"].event_shape) + frame.dim
        else:  # a deterministic site does not say which of its dimensions are batch
            axis = next((i for i, n in enumerate(shape) if n == frame.size), None)
        if axis is not None:
            names[axis] = frame.name
    return names


def fingerprint(program: Callable, args: tuple) -> str:
    """A hash of what a program computes: any change of a distribution, constant or shape changes it."""

    def run(key, args):
        return log_probs(_seeded(program, key, args), {})

    return _jaxpr.fingerprint(run, jax.random.key(0), args)


def _is_output(site):
    latent = site["type"] == "sample" and not site["is_observed"]
    return latent or site["type"] == "deterministic"


def _seeded(program, key, args):
    """The trace of a program that draws everything by itself."""

    def members(site):
        return _all_members(site) if site["type"] == "plate" else None

    with trace() as recorded, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subsample_size does not match")
        substitute(seed(program, key), substitute_fn=members)(*args)
    return recorded


def _all_members(site):
    """The members of a plate whose `subsample_size` exceeds its size, as in a small silo: all of them."""
    size, drawn = site["args"]
    return jnp.arange(size) if drawn is not None and drawn > size else None


def violations(recorded: Trace) -> dict[str, Array]:
    """For each observed site, how many of its values lie outside the support of their distribution."""
    return {
        name: jnp.sum(jnp.logical_not(site["fn"].support(site["value"])))
        for name, site in recorded.items()
        if site["type"] == "sample" and site["is_observed"] and not site["infer"].get("is_auxiliary", False)
    }


def _constrain(site, free):
    support = site["fn"].support
    transform = biject_to(support)
    step = site["infer"].get("_scan_current_index")
    if step is not None and jnp.ndim(free) > _free_ndim(site["fn"], transform):
        free = free[step]  # inside a scan a site takes its own time step
    value = transform(free)
    base = support.base_constraint if isinstance(support, constraints.independent) else support
    if base is not constraints.real:
        log_det = transform.log_abs_det_jacobian(free, value)
        batch_ndim = jnp.ndim(value) - len(site["fn"].event_shape)
        log_det = sum_rightmost(log_det, jnp.ndim(log_det) - batch_ndim)
        numpyro.factor(log_jacobian_name(site["name"]), log_det)
    return value


def log_jacobian_name(site: str) -> str:
    """Name of the factor that holds a site's log-Jacobian."""
    return f"_{site}_log_det"


def _free_ndim(fn, transform):
    return len(fn.shape()) - (transform.codomain.event_dim - transform.domain.event_dim)


def _param_transform(site):
    return biject_to(site["kwargs"].get("constraint", constraints.real))


def _structure(recorded, what):
    latents, observed, plates, params, factors = [], [], [], [], []
    for name, site in recorded.items():
        if site["type"] == "param":
            params.append(name)
        elif site["type"] == "plate":
            size, drawn = site["args"]
            plates.append(Plate(name, size, size if drawn is None else min(drawn, size)))
        elif site["type"] == "sample" and site["is_observed"]:
            (factors if site["infer"].get("is_auxiliary", False) else observed).append(name)
        elif site["type"] == "sample":
            latents.append(_latent(site, what))
    plates += _plates_in_scans(recorded, {plate.name for plate in plates}, what)
    frames = {
        name: {frame.name for frame in site["cond_indep_stack"]}
        for name, site in recorded.items()
        if site["type"] == "sample"
    }
    ratios = {plate.name: plate.size / plate.drawn for plate in plates}
    reasons = {site.name: why_fixed(recorded[site.name], ratios) for site in latents}
    fixed = {name: reason for name, reason in reasons.items() if reason is not None}
    return Structure(
        tuple(latents),
        tuple(observed),
        tuple(plates),
        tuple(params),
        tuple(factors),
        frames,
        frozenset(recorded),
        fixed,
    )


def _plates_in_scans(recorded, known, what):
    """Plates inside a `scan` leave no message of their own, only their mark on the sites."""
    found = {}
    for name, site in recorded.items():
        for frame in site.get("cond_indep_stack", []) if site["type"] == "sample" else []:
            if frame.name not in known:
                found[frame.name] = Plate(frame.name, frame.size, frame.size)
                if site["scale"] is not None:
                    raise ModelError(
                        f"{what} subsamples plate {frame.name!r} inside a scan, or scales the site {name!r} there; "
                        "minibatches of time series need the plate outside: drop subsample_size."
                    )
    return list(found.values())


def _latent(site, what):
    name, fn = site["name"], site["fn"]
    layers = [fn]
    while hasattr(layers[-1], "base_dist"):
        layers.append(layers[-1].base_dist)
    if any(isinstance(layer, MaskedDistribution) for layer in layers):
        raise ModelError(
            f"{what} masks the latent {name!r}, so part of it has no prior; "
            "sample only what is missing (an index instead of obs_mask or handlers.mask)."
        )
    if any(isinstance(layer, Delta) for layer in layers):
        raise ModelError(f"{what} samples {name!r} from a Delta; use numpyro.deterministic.")
    if fn.support is None or fn.support.is_discrete:
        raise ModelError(
            f"{what} has the discrete latent {name!r}; variational inference here needs continuous "
            "latents: sum it out (a mixture distribution, or numpyro.factor)."
        )
    shape = jnp.shape(site["value"])
    frames = tuple(Frame(f.name, f.dim) for f in reversed(site["cond_indep_stack"]))
    return Site(
        name=name,
        shape=shape,
        free_shape=tuple(biject_to(fn.support).inverse_shape(shape)),
        batch_ndim=len(shape) - len(fn.event_shape),
        frames=frames,
    )
