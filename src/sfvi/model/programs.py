"""The two programs of a structured model as log densities of flat unconstrained latents."""

import hashlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from .._types import GlobalVec, Indices, Key, Scalar, Theta
from ..families import Local
from .layout import FlatLayout, LocalLayout
from .tracing import execute, fingerprint, initial_latents, log_probs, output_dims, outputs, violations


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

    def outputs(self, z_global: GlobalVec, theta: Theta) -> dict[str, Array]:
        """Values of the latent and deterministic sites in the model's own space."""
        return outputs(self.run(z_global, theta)[1])

    def dims(self, theta: Theta) -> dict[str, list[str | None]]:
        """Names of the outputs' dimensions."""
        return output_dims(self.run(jnp.zeros(self.layout.size), theta)[1])

    def fingerprint(self) -> str:
        """A hash of the program."""
        return fingerprint(self.program, ())

    def initial(self, key: Key, init_loc_fn: Callable) -> GlobalVec:
        """The starting point that a NumPyro initialization strategy chooses."""
        values = initial_latents(self.program, key, init_loc_fn)
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
    """

    def __init__(
        self,
        program: Callable[[Any, Any], Any],
        population: PopulationProgram,
        layout: LocalLayout,
        rebuild: Callable[[Any], Any],
        signature: Any,
    ):
        self.program = program
        self.population = population
        self.layout = layout
        self.rebuild = rebuild
        self.signature = signature

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
        free = self.layout.split(data.repeat_last(z_local))
        args = (globals_, self.rebuild(data.values))
        return execute(self.program, args, free, theta, indices)[1]

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
        return log_probs(recorded, data.weights())

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
        """A hash of both programs at the data's shapes."""

        def both(values):
            return self.program(self.population.program(), self.rebuild(values))

        return fingerprint(both, (data.values,))


class SiloData(eqx.Module):
    """What a silo holds and never sends.

    Attributes:
        values: The array leaves of the user's data; padded where silos of different size are batched.
        sizes: Of each padded plate, how many members are real.
        ids: Who the silo and its units are, as pairs of words: the noise of a latent follows these.
        num_units: How many exchangeable units it stands for; 0 if that is not known.
        program: The silo's program at these shapes.
    """

    values: dict[str, Array]
    sizes: dict[str, Int[Array, ""]]
    ids: Local
    num_units: Scalar
    program: SiloProgram = eqx.field(static=True)

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


def total(terms: dict[str, Array], dtype) -> Scalar:
    """Sum of all sites' log probabilities."""
    return sum((jnp.sum(term) for term in terms.values()), jnp.zeros((), dtype))
