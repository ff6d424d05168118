"""The local family of a whole silo: its own block first, then the blocks of its units."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from .._types import GlobalVec
from .block import BlockGaussian


class Local(NamedTuple):
    """One value for each part of a silo's latents: a draw, its noise, or its log densities.

    Attributes:
        silo: For the latents outside any plate, which count as one unit; None if there are none.
        units: For each plate of units, with the units on the last axis.
    """

    silo: Shaped[Array, "... 1"] | None
    units: dict[str, Shaped[Array, "... units"]]


class StructuredLocal(eqx.Module):
    r"""$q(z_{Lj} \mid z_G) = q(z_s \mid z_G) \prod_i q(z_i \mid z_G, z_s)$.

    $z_s$ are the silo's latents outside any plate. A unit's block follows $z_G - \mu_G$ and the residual
    $z_s - \mathrm{E}[z_s \mid z_G]$.

    Attributes:
        silo: Family of $z_s$, one unit; None if there are none.
        units: Family of each plate's units.
    """

    silo: BlockGaussian | None
    units: dict[str, BlockGaussian]

    def sample(self, noise: Local, deviation: GlobalVec) -> Local:
        r"""Draw $z_s$, then the units, from noise of the same shapes; `deviation` is $z_G - \mu_G$."""
        own = None
        if self.silo is not None and noise.silo is not None:
            own = self.silo.sample(noise.silo, deviation)
        parent = self._parent(own, deviation)
        drawn = {plate: family.sample(noise.units[plate], parent) for plate, family in self.units.items()}
        return Local(own, drawn)

    def log_prob(self, z_local: Local, deviation: GlobalVec) -> Local:
        """Evaluate the log density of the silo's block and of every unit."""
        own = None
        if self.silo is not None and z_local.silo is not None:
            own = self.silo.log_prob(z_local.silo, deviation)
        parent = self._parent(z_local.silo, deviation)
        densities = {plate: family.log_prob(z_local.units[plate], parent) for plate, family in self.units.items()}
        return Local(own, densities)

    def _parent(self, own, deviation):
        if self.silo is None:
            return deviation
        residual = own - self.silo.mean(deviation)
        return jnp.concatenate([deviation, residual[:, 0]])
