"""Settings of the methods of Table 1 that have to be chosen, and the methods with them."""

from typing import Any, NamedTuple

import optax

from ..algorithms import SFVI, SFVIAvg, Sites
from ..baselines import FedSoul, PFedBayes
from ..zoo import families_for_networks
from .hier_bnn_methods import Split


class Many(NamedTuple):
    """SFVI, with many exchanges.

    Attributes:
        steps: How many.
        step_size: Of Adam; it falls to zero.
        init_scale: How wide weights start.
    """

    steps: int
    step_size: float
    init_scale: float

    def algorithm(self) -> SFVI:
        """With these settings."""
        decay = optax.cosine_decay_schedule(self.step_size, self.steps)
        return SFVI(optimizer=optax.adam(decay), **families_for_networks(init_scale=self.init_scale))


class Few(NamedTuple):
    """SFVI-Avg and Sites, with few exchanges.

    Attributes:
        step_size: Of Adam in a silo.
        init_scale: How wide weights start.
        refit_steps: Of the silos after the last round.
        power: Of the likelihood, see `zoo.fed_pop`.
    """

    step_size: float
    init_scale: float
    refit_steps: int
    power: float = 1.0

    def algorithm(self, kind: type[SFVIAvg] | type[Sites], split: Split) -> SFVIAvg | Sites:
        """With these settings."""
        options: dict[str, Any] = {"num_local_steps": split.local_steps, "refit_steps": self.refit_steps}
        options |= {"optimizer": optax.adam(self.step_size), **families_for_networks(init_scale=self.init_scale)}
        return kind(**options)

    @property
    def title(self) -> str:
        """What is done to the KL term, to be written behind a name."""
        return "" if self.power == 1 else f", KL weight {1 / self.power:g}"


class FairPFedBayes(NamedTuple):
    """The method pFedBayes, with our network, rounds and participation.

    Attributes:
        step_size: Of Adam.
        zeta: Weight of the KL term.
    """

    step_size: float
    zeta: float

    def rival(self, rounds: int, split: Split) -> PFedBayes:
        """With these settings."""
        common: dict[str, Any] = {
            "num_rounds": rounds,
            "num_local_updates": split.local_steps,
            "batch_size": split.batch,
        }
        return PFedBayes.fair(step_size=self.step_size, zeta=self.zeta, **common)


class FairFedSoul(NamedTuple):
    """FedSOUL, with our network, rounds and participation.

    Attributes:
        step_size: Of the server's Adam, which makes one step a round.
        gamma: Of the Langevin steps.
    """

    step_size: float
    gamma: float

    def rival(self, rounds: int, split: Split) -> FedSoul:
        """With these settings."""
        common: dict[str, Any] = {"num_rounds": rounds, "num_local_steps": split.local_steps, "batch_size": split.batch}
        return FedSoul(step_size=self.step_size, gamma=self.gamma, **common)
