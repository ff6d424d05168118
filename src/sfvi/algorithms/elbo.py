"""The ELBO of a model under a user's options: what all algorithms start from, draw and differentiate."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import families
from .._types import GlobalVec, Indices, Key, Scalar, Theta
from ..errors import OptionError
from ..families import AbstractGlobalFamily, Amortized, Local, StructuredLocal
from ..model import SiloData, StructuredModel
from ..objectives import Shared, server_term, silo_term
from . import local_params
from .noise import global_noise, local_noise
from .options import AbstractVariationalOptions

MAX_FULL = 200  # global dimensions up to which the default family has full covariance


class Draw(NamedTuple):
    """The randomness of one evaluation in a silo: the units drawn, and the noise, Monte Carlo samples first."""

    indices: Indices
    noise: Float[Array, "samples n_noise"]
    local_noise: Local


class Latents(NamedTuple):
    """One draw of everything a silo's program needs."""

    z_global: GlobalVec
    z_local: Local
    theta: Theta
    indices: Indices


class Elbo(NamedTuple):
    """The two terms as functions of the parameters, for one model and one set of options."""

    options: AbstractVariationalOptions
    model: StructuredModel

    def start_shared(self, key: Key, theta: Theta) -> Shared:
        r"""The initial $\eta_G$, $\theta$ and $\phi$."""
        loc = self.model.population.initial(key, self.options.init_loc_fn)
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

    def draw(self, key: Key, step: Int[Array, ""], data: SiloData, noise: Float[Array, "samples n_noise"]) -> Draw:
        """Draw units and local noise, as functions of (key, step, unit), to go with the noise of $z_G$."""
        indices = data.draw(jax.random.fold_in(key, step))
        return Draw(indices, noise, local_noise(key, step, data, indices, noise.shape[0], noise.dtype))

    def global_noise(self, key: Key, shared: Shared, num_samples: int) -> Float[Array, "samples n_noise"]:
        r"""Draw $\epsilon_G$."""
        return global_noise(key, num_samples, shared.family.noise_size, shared.family.center.dtype)

    def silo(self, shared: Shared, rows: StructuredLocal, draw: Draw, data: SiloData) -> Scalar:
        r"""Estimate $\mathcal{L}_j$; `rows` are the free parameters of the drawn units."""
        inputs = local_params.network_inputs(self.options, data, draw.indices)

        def term(noise, own_noise):
            local = local_params.complete(self.options, rows, shared.network, inputs)
            return silo_term(data, shared, local, noise, own_noise, draw.indices, estimator=self.options.estimator)

        return _mean(term, draw.noise, draw.local_noise)

    def server(self, shared: Shared, noise: Float[Array, "samples n_noise"]) -> Scalar:
        r"""Estimate $\mathcal{L}_0$."""

        def term(noise):
            return server_term(self.model.population, shared, noise, estimator=self.options.estimator)

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
        first = jax.tree.map(lambda leaf: leaf[0], draw.local_noise)
        z_local = local.sample(first, z_global, shared.family.center)
        return Latents(z_global, z_local, shared.theta, draw.indices)


def _mean(term, *noises):
    """Average a term over Monte Carlo samples, the first axis of the noises."""
    if jax.tree.leaves(noises)[0].shape[0] == 1:
        return term(*jax.tree.map(lambda noise: noise[0], noises))
    return jnp.mean(eqx.filter_vmap(term)(*noises))
