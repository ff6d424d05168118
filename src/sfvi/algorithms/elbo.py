"""The ELBO of a model under a user's options: what all algorithms start from, draw and differentiate."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from numpyro.infer import init_to_feasible

from .. import families
from .._types import GlobalVec, Indices, Key, Scalar, Theta
from ..bounds import Bound
from ..enhanced import enhanced_silo_term
from ..errors import OptionError
from ..families import AbstractGlobalFamily, Amortized, Local, StructuredLocal
from ..model import SiloData, StructuredModel
from ..objectives import Shared, factor_term, server_term, silo_term
from . import local_params
from .noise import global_noise, local_noise, matched, matched_local
from .options import AbstractVariationalOptions

MAX_FULL = 200  # global dimensions up to which the default family has full covariance


class Draw(NamedTuple):
    """The randomness of one evaluation in a silo: the units drawn, and the noise, Monte Carlo samples first."""

    indices: Indices
    noise: Float[Array, "samples n_noise"]
    local_noise: Local


class Latents(NamedTuple):
    """One draw of everything a silo's program needs; of local latents K, on the first axis."""

    z_global: GlobalVec
    z_local: Local
    theta: Theta
    indices: Indices


class Drawn(NamedTuple):
    r"""All that silos' terms need of $q(z_G; \eta_G)$: draws, and its center."""

    z_global: Float[Array, "samples n_global"]
    center: GlobalVec

    @classmethod
    def of(cls, family: AbstractGlobalFamily, noise: Float[Array, "samples n_noise"]) -> "Drawn":
        """Draw with given noise."""
        return cls(jax.vmap(family.sample)(noise), family.center)


class Given(eqx.Module):
    r"""In place of $q(z_G)$ where `Drawn` is known: its draws are the noise it is given."""

    center: GlobalVec

    def sample(self, noise: GlobalVec) -> GlobalVec:
        """What was drawn."""
        return noise


class Elbo(NamedTuple):
    """The two terms as functions of the parameters, for one model and one set of options.

    Attributes:
        options: What the user chose.
        model: The model.
        matched: Whether draws are brought to mean zero and variance one exactly, see `noise.matched`.
    """

    options: AbstractVariationalOptions
    model: StructuredModel
    matched: bool = False

    @property
    def bound(self) -> Bound:
        """What is maximized; the ELBO if the user left the choice open."""
        return self.options.bound or Bound()

    def start_shared(self, key: Key, theta: Theta) -> Shared:
        r"""The initial $\eta_G$, $\theta$ and $\phi$."""
        loc = self.model.population.initial(key, theta, self.options.init_loc_fn)
        build = self.options.global_family
        if build is None:
            build = families.full() if 0 < loc.size <= MAX_FULL else families.mean_field()
        chosen = self.options.local_family
        network = chosen.initial() if isinstance(chosen, Amortized) else None
        family = build(loc, self.options.init_scale)
        if not isinstance(family, AbstractGlobalFamily):
            raise OptionError(
                f"global_family returns {family!r}; give what families.full() returns, or a function of (loc, scale) "
                "that returns an AbstractGlobalFamily."
            )
        return Shared(family, theta, network)

    def start_local(self, data: SiloData) -> StructuredLocal:
        r"""The initial $\eta_{Lj}$, the same for every unit; amortized units have none."""
        return local_params.build(self.options, data, self.model.population.layout.size)

    def start_silo(self, key: Key, shared: Shared, data: SiloData) -> StructuredLocal:
        r"""The same, with the silo's own latents where `init_loc_fn` puts them."""
        family, strategy = self.start_local(data), self.options.init_loc_fn
        if family.silo is None or strategy is init_to_feasible:
            return family
        loc = data.program.initial_own(key, shared.family.center, shared.theta, data, strategy)
        return eqx.tree_at(lambda family: family.silo.loc, family, loc)

    def draw(self, key: Key, step: Int[Array, ""], data: SiloData, noise: Float[Array, "samples n_noise"]) -> Draw:
        """Draw units and local noise, as functions of (key, step, unit), to go with the noise of $z_G$."""
        indices = data.draw(jax.random.fold_in(key, step))
        samples, draws = noise.shape[0], self.bound.draws_of_units
        own_noise = local_noise(key, step, data, indices, samples * draws, noise.dtype)
        if self.matched:
            own_noise = matched_local(own_noise, noise)
        if draws > 1:
            apart = jax.tree.map(lambda leaf: leaf.reshape(samples, draws, *leaf.shape[1:]), own_noise)
            own_noise = Local(None if apart.silo is None else apart.silo[:, 0], apart.units)
        return Draw(indices, noise, own_noise)

    def global_noise(self, key: Key, shared: Shared, num_samples: int) -> Float[Array, "samples n_noise"]:
        r"""Draw $\epsilon_G$."""
        noise = global_noise(key, num_samples, shared.family.noise_size, shared.family.center.dtype)
        return matched(noise) if self.matched else noise

    def silo(self, shared: Shared, rows: StructuredLocal, draw: Draw, data: SiloData) -> Scalar:
        r"""Estimate $\mathcal{L}_j$; `rows` are the free parameters of the drawn units."""
        inputs = local_params.network_inputs(self.options, data, draw.indices)

        def term(noise, own_noise):
            local = local_params.complete(self.options, rows, shared.network, inputs)
            args = (data, shared, local, noise, own_noise, draw.indices)
            if self.bound.draws_of_units == 1 or not data.program.layout.groups:
                return silo_term(*args, estimator=self.options.estimator)
            return enhanced_silo_term(*args, estimator=self.options.estimator, chunk=self.bound.chunk)

        return _mean(term, draw.noise, draw.local_noise)

    def server(self, shared: Shared, noise: Float[Array, "samples n_noise"]) -> Scalar:
        r"""Estimate $\mathcal{L}_0$."""

        def term(noise):
            return server_term(self.model.population, shared, noise, estimator=self.options.estimator)

        return _mean(term, noise)

    def factor(
        self,
        log_factor: Callable[[GlobalVec], Scalar],
        family: AbstractGlobalFamily,
        noise: Float[Array, "samples n_noise"],
    ) -> Scalar:
        r"""Estimate $\mathrm{E}_q[\log t(z_G) - \log q(z_G)]$ for a factor $t$."""

        def term(noise):
            return factor_term(log_factor, family, noise, estimator=self.options.estimator)

        return _mean(term, noise)

    def local(self, shared: Shared, free: StructuredLocal, data: SiloData) -> StructuredLocal:
        r"""$q(z_{Lj} \mid z_G)$ of all units, free and amortized."""
        inputs = local_params.network_inputs(self.options, data, {})
        return local_params.complete(self.options, free, shared.network, inputs)

    def latents(self, shared: Shared, free: StructuredLocal, draw: Draw, data: SiloData) -> Latents:
        """The first sample of a draw, to find out what went wrong with it."""
        z_global = shared.family.sample(draw.noise[0])
        rows = local_params.select(free, draw.indices)
        inputs = local_params.network_inputs(self.options, data, draw.indices)
        local = local_params.complete(self.options, rows, shared.network, inputs)
        first, draws = jax.tree.map(lambda leaf: leaf[0], draw.local_noise), self.bound.draws_of_units
        units = first.units if draws > 1 else {plate: leaf[None] for plate, leaf in first.units.items()}

        def sample(units):
            return local.sample(Local(first.silo, units), z_global, shared.family.center)

        z_local = jax.vmap(sample, axis_size=draws)(units)
        return Latents(z_global, z_local, shared.theta, draw.indices)


def _mean(term, *noises):
    """Average a term over Monte Carlo samples, the first axis of the noises."""
    if jax.tree.leaves(noises)[0].shape[0] == 1:
        return term(*jax.tree.map(lambda noise: noise[0], noises))
    return jnp.mean(eqx.filter_vmap(term)(*noises))
