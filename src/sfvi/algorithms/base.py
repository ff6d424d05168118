"""The protocol: pure functions for the server and for the silos, which every engine runs unchanged."""

from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Array, Float

from .._types import Key, Theta
from ..families import StructuredLocal
from ..model import SiloData, StructuredModel
from ..objectives import Shared
from .elbo import Elbo, Latents
from .participation import Participants


@runtime_checkable
class FederatedAlgorithm(Protocol):
    """Server and silos as pure functions over pytrees.

    A round is `participants`, `broadcast`, `silo_step` in every silo that takes part, `server_step`; `server_init` and
    `silo_init` come before the first round and `silo_finish` after the last. Nothing passes between the two sides but
    what `broadcast` and `silo_step` return as Broadcast and Reply. State is what the next step needs; Info is for
    people and stays where it was made. Keys are the same in every round: what is drawn is a function of (key, round,
    unit).

    Attributes:
        elbo: The model under the user's options.
        additive: Whether the server uses only the sum of the replies and silos treat their units one by one, so that an
            engine may compute several silos as if they were one.
        steps_per_round: Optimizer steps of a silo in a round.
        accumulates: Whether replies, less those of `silent`, add up over rounds, so that a later one may bring what an
            earlier one left out.
        combines: What the server makes of replies, where that is all it needs of them: "weighted sum" (by who takes
            part), "sum" or "mean" (of copies of what is shared, with standard deviations in place of their
            logarithms); None if it needs each.
    """

    @property
    def elbo(self) -> Elbo:
        """See above."""
        ...

    @property
    def additive(self) -> bool:
        """See above."""
        ...

    @property
    def steps_per_round(self) -> int:
        """See above."""
        ...

    @property
    def accumulates(self) -> bool:
        """See above."""
        ...

    @property
    def combines(self) -> Literal["weighted sum", "sum", "mean"] | None:
        """See above."""
        ...

    def server_init(self, key: Key, theta: Theta, num_units: Float[Array, " silos"]) -> Any:
        """Make the server's state; `num_units` is the one number that each silo tells beforehand."""
        ...

    def server_start(self, shared: Shared, num_units: Float[Array, " silos"]) -> Any:
        """Make the server's state from parameters that another algorithm found."""
        ...

    def silo_init(self, key: Key, broadcast: Any, data: SiloData) -> Any:
        """Make a silo's state, at the first broadcast."""
        ...

    def silo_start(self, family: StructuredLocal, broadcast: Any, data: SiloData) -> Any:
        """Make a silo's state from parameters that another algorithm found."""
        ...

    def participants(self, key: Key, state: Any) -> Participants:
        """Say who takes part in this round."""
        ...

    def broadcast(self, key: Key, state: Any) -> Any:
        """Say what the server sends to every silo in this round."""
        ...

    def silo_step(self, key: Key, state: Any, broadcast: Any, data: SiloData) -> tuple[Any, Any, Any]:
        """Do a silo's work of one round: new state, Reply, Info."""
        ...

    def server_step(self, state: Any, broadcast: Any, replies: Any, participants: Participants) -> tuple[Any, Any]:
        """Take in the replies, stacked in the order of `participants`: new state, Info."""
        ...

    def silent(self, broadcast: Any) -> Any:
        """The Reply of a silo that has nothing to say: what any reply to this broadcast looks like."""
        ...

    def silo_finish(self, key: Key, state: Any, broadcast: Any, data: SiloData) -> StructuredLocal:
        """A silo's local family under the last broadcast; needs no reply."""
        ...

    def latents(self, key: Key, state: Any, broadcast: Any, data: SiloData) -> Latents:
        """The latents that `silo_step` draws at the same arguments, for finding out what went wrong there."""
        ...

    def remarks(self, trace: dict[str, Any]) -> list[str]:
        """What a user should know about the rounds done, from the server's Info of each."""
        ...


@runtime_checkable
class StepsTogether(Protocol):
    """What an additive algorithm may offer beside: the steps of several silos for less than each one's."""

    def silo_steps(self, key: Key, states: Any, broadcast: Any, datas: SiloData) -> tuple[Any, Any, Any]:
        """Do the work of silos side by side, on a leading axis: their states, the sum of their Replies and Infos."""
        ...


@runtime_checkable
class AlgorithmOptions(Protocol):
    """What a user chooses; `bind` makes the algorithm for a model."""

    @property
    def usual_rounds(self) -> int:
        """Rounds that mostly suffice, for users who give none."""
        ...

    def planned(self, num_rounds: int) -> "AlgorithmOptions":
        """The options for a run of so many rounds and no fewer."""
        ...

    def stages(self) -> list[tuple[Any, int | None]]:
        """Options of the algorithms to run one after the other, each with its rounds; None for what the user gives."""
        ...

    def bind(self, model: StructuredModel) -> FederatedAlgorithm:
        """Make the functions of the protocol for a model."""
        ...
