"""The two programs of a structured model as log densities of flat unconstrained latents."""

import copy
import functools
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from .. import _jaxpr
from .._compile import on_one_thread
from .._types import GlobalVec, Indices, Key, Scalar, Theta
from ..families import Local
from .centring import Centred, Placed, auxiliary_name, enter, leave, parameter_name, recentre
from .layout import FlatLayout, LocalLayout
from .tracing import (
    execute,
    fingerprint,
    gaussian_parameters,
    initial_latents,
    initial_params,
    log_probs,
    output_dims,
    outputs,
    unit_log_probs,
    violations,
)

if TYPE_CHECKING:
    from .apart import Apart


class Curvature(NamedTuple):
    """Of the log prior: the same everywhere (a Gaussian), then also diagonal; and whether it has parameters."""

    constant: bool
    diagonal: bool
    parametrized: bool


class PopulationProgram:
    r"""The shared program: $\log p_\theta(z_G)$, Jacobians of the global sites included.

    Attributes:
        program: The user's function.
        layout: Where the global sites lie in `z_global`.
    """

    def __init__(self, program: Callable[[], Any], layout: FlatLayout):
        self.program = program
        self.layout = layout

    def run(self, z_global: GlobalVec, theta: Theta) -> tuple[Any, dict[str, dict]]:
        """Return what the program returns at `z_global`, and its trace."""
        return execute(self.program, (), self.layout.split(z_global), theta, {})

    def log_terms(self, z_global: GlobalVec, theta: Theta) -> dict[str, Array]:
        """Log probability of each site."""
        return log_probs(self.run(z_global, theta)[1], {})

    def log_prob(self, z_global: GlobalVec, theta: Theta) -> Scalar:
        r"""Evaluate $\log p_\theta(z_G)$."""
        return total(self.log_terms(z_global, theta), z_global.dtype)

    @functools.cached_property
    def curvature(self) -> Curvature:
        r"""What is known of the curvature of $\log p_\theta(z_G)$, read off the program.

        It is taken for Gaussian if every site is a Normal or MultivariateNormal whose parameters start from no latent,
        and nothing else depends on a latent.
        """
        key = jax.random.key(0)
        theta = initial_params(self.program, key, ())
        free = self.layout.split(jnp.zeros(self.layout.size))
        recorded = execute(self.program, (), free, theta, {})[1]
        sites = {site.name: recorded[site.name]["fn"] for site in self.layout.sites}
        normal = all(gaussian_parameters(fn) is not None for fn in sites.values())

        def parameters(free, theta):
            found = execute(self.program, (), free, theta, {})[1]
            terms = [jnp.ravel(term) for name, term in log_probs(found, {}).items() if name not in sites]
            for name in sites:
                terms += [jnp.ravel(value) for value in gaussian_parameters(found[name]["fn"]) or ()]
            return terms

        used = _jaxpr.dependence(parameters, free, theta)
        constant = normal and not any(any(inputs[: len(free)]) for inputs in used)
        diagonal = constant and all(len(gaussian_parameters(fn) or ()) == 2 for fn in sites.values())
        return Curvature(constant, diagonal, bool(theta))

    def outputs(self, z_global: GlobalVec, theta: Theta) -> dict[str, Array]:
        """Values of the latent and deterministic sites in the model's own space."""
        return outputs(self.run(z_global, theta)[1])

    def dims(self, theta: Theta) -> dict[str, list[str | None]]:
        """Names of the outputs' dimensions."""
        return output_dims(self.run(jnp.zeros(self.layout.size), theta)[1])

    def fingerprint(self) -> str:
        """A hash of the program."""
        return fingerprint(self.program, ())

    def initial(self, key: Key, theta: Theta, init_loc_fn: Callable) -> GlobalVec:
        """The starting point that a NumPyro initialization strategy chooses."""
        values = initial_latents(self.program, (), theta, key, init_loc_fn)
        return self.layout.join(values).astype(jnp.result_type(float))


class SiloProgram:
    r"""A silo's program at given data shapes: $\log p_\theta(y_j, z_{Lj} \mid z_G)$.

    Silos whose program and shapes are the same share one object.

    Attributes:
        program: The user's function.
        population: The shared program, which turns `z_global` into what the user's function receives.
        layout: Where the local sites lie.
        rebuild: Puts the array leaves of the data back into the user's own structure.
        signature: That structure and its constants, comparable.
        centred: The sites that are not as written, see `centring.py`. They keep their names, here and in all results.
        learned: Names in $\theta$ of those of their numbers that are learned.
        recentred: The user's function with those sites replaced.
        loose: Sites outside the units' plates that are computed from units' latents, see `owners.py`.
    """

    def __init__(
        self,
        program: Callable[[Any, Any], Any],
        population: PopulationProgram,
        layout: LocalLayout,
        rebuild: Callable[[Any], Any],
        signature: Any,
        centred: Centred,
        loose: tuple[str, ...] = (),
    ):
        self.program = program
        self.population = population
        self.layout = layout
        self.rebuild = rebuild
        self.signature = signature
        self.centred = centred
        self.learned = tuple(parameter_name(site) for site, number in centred.items() if number is None)
        self.recentred = recentre(program, centred)
        self.loose = loose
        self.omitted: frozenset[str] = frozenset()

    def without(self, *plates: str) -> "SiloProgram":
        """The same program, of which no site in these plates counts, whatever its value."""
        found = copy.copy(self)
        found.omitted = self.omitted | set(plates)
        return found

    def run(
        self,
        z_global: GlobalVec,
        z_local: Local,
        theta: Theta,
        data: "SiloData",
        indices: Indices,
    ) -> dict[str, dict]:
        """The trace of the program at given latents and drawn members."""
        globals_, _ = self.population.run(z_global, theta)
        free = enter(self.layout.split(data.repeat_last(z_local)), self.centred)
        args = (globals_, self.rebuild(data.values))
        return leave(execute(self.recentred, args, free, theta, indices)[1], self.centred)

    def log_terms(
        self,
        z_global: GlobalVec,
        z_local: Local,
        theta: Theta,
        data: "SiloData",
        indices: Indices,
    ) -> dict[str, Array]:
        """Log probability of each site, elementwise over its plates; padding counts nothing."""
        recorded = self.run(z_global, z_local, theta, data, indices)
        counted = {
            name: site
            for name, site in recorded.items()
            if self.omitted.isdisjoint(frame.name for frame in site.get("cond_indep_stack", ()))
        }
        return log_probs(counted, data.weights())

    def log_prob(
        self,
        z_global: GlobalVec,
        z_local: Local,
        theta: Theta,
        data: "SiloData",
        indices: Indices,
    ) -> Scalar:
        r"""Evaluate $\log p_\theta(y_j, z_{Lj} \mid z_G)$; minibatches are scaled up, unbiased."""
        terms = self.log_terms(z_global, z_local, theta, data, indices)
        return total(terms, z_global.dtype)

    def unit_log_probs(
        self,
        z_global: GlobalVec,
        z_local: Local,
        theta: Theta,
        data: "SiloData",
        indices: Indices,
    ) -> tuple[Scalar, dict[str, Float[Array, " drawn"]]]:
        r"""Evaluate $\log p_\theta(y_i, z_i \mid z_G, z_s)$ of each drawn unit, not scaled up, and that of all else."""
        recorded = self.run(z_global, z_local, theta, data, indices)
        scales = {group.plate.name: group.plate.size / group.plate.drawn for group in self.layout.groups}
        rest, units = unit_log_probs(recorded, data.weights(), scales, data.owners)
        return rest.astype(z_global.dtype), units

    def separates(self, theta: Theta, data: "SiloData") -> bool:
        r"""Whether the units' terms depend on their own latents only, and all else on none.

        Every element of the sites outside their plates must have at most one owner. And at random latents the gradient
        of $\sum_i c_i \log p_i$ in $z_i$ must be $c_i$ times that of $\sum_i \log p_i$ for random $c$, and that of
        all else zero. Minibatches must be of units: of a unit's rows they would bias the logarithm of its weight.
        """
        whole = {plate.name for plate in self.layout.subsampled} <= {group.plate.name for group in self.layout.groups}
        return whole and data.attributed and bool(self._apart(theta, data))

    @on_one_thread
    def _apart(self, theta, data):
        generator, own = np.random.default_rng(0), self.layout.own.size  # JAX's random numbers take long to compile

        def normal(*shape):
            return jnp.asarray(generator.normal(size=shape), float)

        z_own = normal(own, 1) if own else None
        z_units = {group.plate.name: normal(group.block, group.plate.drawn) for group in self.layout.groups}
        signs = {plate: normal(z.shape[-1]) for plate, z in z_units.items()}
        indices = data.draw(jax.random.key(0))

        def terms(z_units):
            z_global = jnp.zeros(self.population.layout.size)
            return self.unit_log_probs(z_global, Local(z_own, z_units), theta, data, indices)

        (rest, log_p), pull = jax.vjp(terms, z_units)
        ones = jax.tree.map(jnp.ones_like, log_p)
        (plain,), (weighted,) = pull((jnp.zeros_like(rest), ones)), pull((jnp.zeros_like(rest), signs))
        (outside,) = pull((jnp.ones_like(rest), jax.tree.map(jnp.zeros_like, log_p)))
        expected = {plate: gradient * signs[plate] for plate, gradient in plain.items()}
        apart = jax.tree.map(jnp.subtract, weighted, expected)
        return _largest((apart, outside)) <= 1e-3 * _largest(plain)

    def hand_over_centring(
        self, z_global: GlobalVec, z_local: Local, theta: Theta, data: "SiloData", indices: Indices
    ) -> tuple[Local, Theta]:
        r"""Let the gradient in a learned $c$ pass through the latents instead of $\theta$; no value changes.

        $c$ is a parameter of $q$ as a distribution of $b$, so its gradient may stick the landing like that of others:
        $\partial_c \tilde b$ is what `Placed.slope` says, and everywhere else $c$ is stopped. The two ways differ by
        $-\log s - \partial_{\tilde b} \log q \cdot \partial_c \tilde b$, whose mean is zero.
        """
        if not self.learned:
            return z_local, theta
        placed: dict[str, Placed] = {}
        globals_, _ = self.population.run(z_global, theta)
        values, free = self.layout.split(z_local), self.layout.split(data.repeat_last(z_local))
        program = recentre(self.program, self.centred, placed)
        execute(program, (globals_, self.rebuild(data.values)), enter(free, self.centred), theta, indices)
        for name, place in placed.items():
            step = place.number - jax.lax.stop_gradient(place.number)
            values[name] = values[name] + step * jax.lax.stop_gradient(place.slope(free[name]))
        stopped = {name: jax.lax.stop_gradient(theta[name]) for name in self.learned}
        return self.layout.join(values), theta | stopped

    def initial_own(
        self, key: Key, z_global: GlobalVec, theta: Theta, data: "SiloData", init_loc_fn: Callable
    ) -> Float[Array, "n_own 1"]:
        """The starting point of the silo's own latents, those of no unit, that a NumPyro strategy chooses."""
        globals_, _ = self.population.run(z_global, theta)
        args = (globals_, self.rebuild(data.values))
        own_key = jax.random.fold_in(key, data.silo_word)
        values = initial_latents(self.recentred, args, theta, own_key, init_loc_fn)
        for name in self.centred:  # at the location that the program gives it
            values[name] = jnp.zeros_like(values.pop(auxiliary_name(name)))
        return self.layout.own.join(values).astype(z_global.dtype)[:, None]

    def outputs(self, z_global: GlobalVec, z_local: Local, theta: Theta, data: "SiloData") -> dict[str, Array]:
        """Values of the local latent and deterministic sites, of all units, in the model's own space."""
        return outputs(self.run(z_global, z_local, theta, data, data.everyone()))

    def dims(self, z_local: Local, theta: Theta, data: "SiloData") -> dict[str, list[str | None]]:
        """Names of the outputs' dimensions."""
        z_global = jnp.zeros(self.population.layout.size)
        return output_dims(self.run(z_global, z_local, theta, data, data.everyone()))

    def violations(self, theta: Theta, data: "SiloData") -> dict[str, Array]:
        """For each observed site, how many of the silo's values lie outside the support of their distribution."""
        own = jnp.zeros((self.layout.own.size, 1)) if self.layout.own.size else None
        units = {group.plate.name: jnp.zeros((group.block, group.plate.size)) for group in self.layout.groups}
        z_global = jnp.zeros(self.population.layout.size)
        return violations(self.run(z_global, Local(own, units), theta, data, data.everyone()))

    def fingerprint(self, data: "SiloData") -> str:
        """A hash of both programs at the data's shapes, and of the sites that are not as written."""

        def both(values):
            return self.recentred(self.population.program(), self.rebuild(values))

        programs = fingerprint(both, (data.values,))
        return programs + "".join(f",{site}:{number}" for site, number in sorted(self.centred.items()))


class SiloData(eqx.Module):
    """What a silo holds and never sends.

    Attributes:
        values: The array leaves of the user's data; padded where silos of different size are batched.
        sizes: Of each padded plate, how many members are real.
        ids: Who the silo and its units are, as pairs of words: the noise of a latent follows these.
        num_units: How many exchangeable units it stands for; 0 if that is not known.
        program: The silo's program at these shapes.
        owners: For each loose site the number of the unit that each element belongs to, see `owners.py`.
        apart: How its units are taken one by one, see `apart.py`; None unless an algorithm asks for it.
    """

    values: dict[str, Array]
    sizes: dict[str, Int[Array, ""]]
    ids: Local
    num_units: Scalar
    program: SiloProgram = eqx.field(static=True)
    owners: dict[str, Int[Array, "..."]] = eqx.field(default_factory=dict)
    apart: "Apart | None" = None

    @property
    def attributed(self) -> bool:
        """Whether every element of the sites outside the units' plates depends on one unit at most."""
        return set(self.program.loose) <= set(self.owners)

    def weights(self) -> dict[str, Float[Array, " drawn"]]:
        """The factor of each member of a padded plate.

        With all members present, 1 for the real and 0 for the padding. A minibatch draws real ones only, and
        corrects the scale that the program computes from the padded size.
        """
        weights = {}
        for plate in self.program.layout.plates:
            if plate.name in self.sizes:
                size = self.sizes[plate.name]
                if plate.drawn < plate.size:
                    weights[plate.name] = jnp.full(plate.drawn, size.astype(float) / plate.size)
                else:
                    weights[plate.name] = (jnp.arange(plate.size) < size).astype(float)
        return weights

    def repeat_last(self, z_local: Local) -> Local:
        """Give padding the latents of the last real unit, whose data it repeats: what counts nothing stays finite."""
        units = dict(z_local.units)
        for plate in self.program.layout.plates:
            if plate.name in self.sizes and plate.name in units and plate.drawn == plate.size:
                rows = jnp.minimum(jnp.arange(plate.size), self.sizes[plate.name] - 1)
                units[plate.name] = units[plate.name][:, rows]
        return Local(z_local.silo, units)

    def draw(self, key: Key) -> Indices:
        """Draw the members of every subsampled plate, without replacement, from the real ones."""
        if not self.program.layout.subsampled:
            return {}
        key = jax.random.fold_in(key, self.silo_word)
        indices = {}
        for position, plate in enumerate(self.program.layout.subsampled):
            scores = jax.random.uniform(jax.random.fold_in(key, position), (plate.size,))
            if plate.name in self.sizes:
                real = jnp.arange(plate.size) < self.sizes[plate.name]
                scores = jnp.where(real, scores, -1.0)
            indices[plate.name] = jax.lax.top_k(scores, plate.drawn)[1]
        return indices

    @property
    def silo_word(self) -> UInt32[Array, ""]:
        """The number that stands for the silo."""
        assert self.ids.silo is not None
        return self.ids.silo[0, 0]

    def fingerprint(self) -> str:
        """A hash of the data."""
        digest = hashlib.sha256()
        for name, value in self.values.items():
            digest.update(f"{name}{value.shape}{value.dtype}".encode() + np.asarray(value).tobytes())
        return digest.hexdigest()

    def everyone(self) -> Indices:
        """All members of every subsampled plate."""
        return {plate.name: jnp.arange(plate.size) for plate in self.program.layout.subsampled}

    def sum_units(self, values: Local) -> Scalar:
        """Add up one number per unit: padding counts nothing, minibatches are scaled up."""
        parts = [] if values.silo is None else [jnp.sum(values.silo)]
        weights = self.weights()
        for group in self.program.layout.groups:
            plate = group.plate
            units = values.units[plate.name]
            if plate.name in weights:
                units = units * weights[plate.name].astype(units.dtype)
            parts.append(jnp.sum(units) * (plate.size / plate.drawn))
        return sum(parts, jnp.zeros(()))


def _largest(tree):
    """The largest absolute value of all arrays."""
    return functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x), initial=0.0) for x in jax.tree.leaves(tree)), 0.0)


def total(terms: dict[str, Array], dtype) -> Scalar:
    """Sum of all sites' log probabilities."""
    return sum((jnp.sum(term) for term in terms.values()), jnp.zeros((), dtype))
