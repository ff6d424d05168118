"""The posterior predictive of a silo: means of deterministic sites over draws of all latents."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._types import GlobalVec, Key
from .enhanced import resample
from .errors import DataError, OptionError
from .families import Local, StructuredLocal
from .model import SiloData
from .objectives import Shared


def check_alike(name: str, fitted: SiloData, new: SiloData, num_samples: int) -> None:
    """Refuse data whose latents were not fitted."""
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise OptionError(f"predict: num_samples is {num_samples!r}; give a whole number of at least 1.")
    if new.program.layout.groups:
        plates = ", ".join(repr(group.plate.name) for group in new.program.layout.groups)
        raise DataError(
            f"predict: in silo {name!r} the members of {plates} have latents of their own, and new ones would have to "
            "be fitted; use sfvi.fit_silo."
        )
    if new.program.layout.own != fitted.program.layout.own:
        raise DataError(
            f"predict: with these data silo {name!r} has other latents than those fitted; give the same shapes."
        )


def check_sites(name: str, there: Sequence[str], sites: Sequence[str] | None) -> None:
    """Refuse sites that are not there, and programs without any."""
    if isinstance(sites, str):
        raise OptionError(f"predict: sites is the text {sites!r}; give a list, [{sites!r}].")
    if not there:
        raise OptionError(
            f"predict: the program of silo {name!r} has no deterministic site; add numpyro.deterministic."
        )
    unknown = [site for site in sites or () if site not in there]
    if unknown:
        named = ", ".join(map(repr, there))
        raise OptionError(f"predict: {unknown[0]!r} is no deterministic site of silo {name!r}; there are {named}.")


def draw_latents(
    key: Key,
    shared: Shared,
    local: StructuredLocal,
    data: SiloData,
    noise: Float[Array, " n_noise"],
    *,
    num_draws: int,
) -> tuple[GlobalVec, Local]:
    r"""One draw of all latents; with the locally enhanced bound, chosen among K of each unit.

    Args:
        key: Of the silo's latents.
        shared: $\eta_G$ and $\theta$.
        local: $q(z_L \mid z_G)$.
        data: The silo's.
        noise: $\epsilon_G$.
        num_draws: K.
    """
    own_key, units_key, choice_key = jax.random.split(key, 3)
    layout, dtype = data.program.layout, shared.family.center.dtype
    own = jax.random.normal(own_key, (layout.own.size, 1), dtype) if layout.own.size else None
    units = {
        group.plate.name: jax.random.normal(
            jax.random.fold_in(units_key, position), (num_draws, group.block, group.plate.size), dtype
        )
        for position, group in enumerate(layout.groups)
    }
    if num_draws > 1 and units:
        return resample(choice_key, data, shared, local, noise, Local(own, units))
    z_global = shared.family.sample(noise)
    first = Local(own, {plate: values[0] for plate, values in units.items()})
    return z_global, local.sample(first, z_global, shared.family.center)


@eqx.filter_jit
def posterior_means(
    shared: Shared, local: StructuredLocal, data: SiloData, key: Key, num_samples: int
) -> dict[str, Array]:
    """Means over draws of the silo program's deterministic sites, for all rows of the data."""
    program, dtype = data.program, shared.family.center.dtype
    size, own = shared.family.noise_size, program.layout.own.size
    latents = {site.name for site in program.layout.own.sites}

    def one(key):
        global_key, own_key = jax.random.split(key)
        z_global = shared.family.sample(jax.random.normal(global_key, (size,), dtype))
        noise = Local(jax.random.normal(own_key, (own, 1), dtype) if own else None, {})
        z_local = local.sample(noise, z_global, shared.family.center)
        found = program.outputs(z_global, z_local, shared.theta, data)
        return {site: jnp.asarray(value, dtype) for site, value in found.items() if site not in latents}

    def add(total, key):
        return jax.tree.map(jnp.add, total, one(key)), None

    keys = jax.random.split(key, num_samples)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(one, key))
    total, _ = jax.lax.scan(add, zeros, keys)
    return jax.tree.map(lambda leaf: leaf / num_samples, total)
