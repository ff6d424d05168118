"""The local family of a whole silo: its own block first, then the blocks of its units."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from .._types import GlobalVec
from .amortized import AmortizedBlock
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
    $z_s - \mathrm{E}[z_s \mid z_G]$; an amortized one sees $(z_G, z_s)$ themselves.

    Attributes:
        silo: Family of $z_s$, one unit; None if there are none.
        units: Family of each plate's units.
    """

    silo: BlockGaussian | None
    units: dict[str, BlockGaussian | AmortizedBlock]

    def sample(self, noise: Local, z_global: GlobalVec, center: GlobalVec) -> Local:
        r"""Draw $z_s$, then the units, from noise of the same shapes; `center` is $\mu_G$."""
        own = None
        if self.silo is not None and noise.silo is not None:
            own = self.silo.sample(noise.silo, z_global - center)
        blocks, deviation = self._given(own, z_global, center)
        return Local(own, {plate: block.sample(noise.units[plate], deviation) for plate, block in blocks.items()})

    def log_prob(self, z_local: Local, z_global: GlobalVec, center: GlobalVec) -> Local:
        """Evaluate the log density of the silo's block and of every unit."""
        own = None
        if self.silo is not None and z_local.silo is not None:
            own = self.silo.log_prob(z_local.silo, z_global - center)
        blocks, deviation = self._given(z_local.silo, z_global, center)
        return Local(own, {plate: block.log_prob(z_local.units[plate], deviation) for plate, block in blocks.items()})

    def conditional(
        self, own: Shaped[Array, "block 1"] | None, z_global: GlobalVec, center: GlobalVec
    ) -> dict[str, BlockGaussian]:
        r"""The units' blocks at given $(z_G, z_s)$, which they no longer follow: $\phi_i$, means and scales."""
        blocks, deviation = self._given(own, z_global, center)
        return {plate: block.conditional(deviation) for plate, block in blocks.items()}

    def recentered(self, shift: GlobalVec) -> "StructuredLocal":
        r"""The same $q(z_{Lj} \mid z_G)$, measured from $\mu_G$ + `shift`; free blocks only."""
        own = None if self.silo is None else self.silo.recentered(shift)
        return StructuredLocal(own, {plate: block.recentered(shift) for plate, block in self.units.items()})

    def _given(self, own, z_global, center):
        """The units' blocks at the given parents, and the deviation that these follow."""
        parent, deviation = z_global, z_global - center
        if self.silo is not None:
            residual = own - self.silo.mean(deviation)
            parent = jnp.concatenate([parent, own[:, 0]])
            deviation = jnp.concatenate([deviation, residual[:, 0]])
        return {plate: block.given(parent) for plate, block in self.units.items()}, deviation
