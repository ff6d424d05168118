"""The protocol: five pure functions, which every engine runs unchanged."""

from typing import Any, Protocol, runtime_checkable

from .._types import Key, Theta
from ..model import SiloData, StructuredModel


@runtime_checkable
class FederatedAlgorithm(Protocol):
    """Server and silos as pure functions over pytrees.

    Nothing passes between the two sides but what `broadcast` and `silo_step` return as Broadcast and Reply.
    State is what the next step needs; Info is for people and stays where it was made. Keys are the same in every
    round: what is drawn is a function of (key, round, unit).

    Attributes:
        additive: Whether the server uses only the sum of the replies and silos treat their units one by one, so that an
            engine may compute several silos as if they were one.
    """

    @property
    def additive(self) -> bool:
        """See above."""
        ...

    def server_init(self, key: Key, theta: Theta) -> Any:
        """Make the server's state."""
        ...

    def silo_init(self, key: Key, data: SiloData) -> Any:
        """Make a silo's state."""
        ...

    def broadcast(self, key: Key, state: Any) -> Any:
        """Say what the server sends to every silo in this round."""
        ...

    def silo_step(self, key: Key, state: Any, broadcast: Any, data: SiloData) -> tuple[Any, Any, Any]:
        """Do a silo's work of one round: new state, Reply, Info."""
        ...

    def latents(self, key: Key, state: Any, broadcast: Any, data: SiloData) -> tuple[Any, Any, Any]:
        """The latents that `silo_step` draws at the same arguments, for finding out what went wrong there."""
        ...

    def server_step(self, state: Any, broadcast: Any, replies: Any) -> tuple[Any, Any]:
        """Take in the replies, stacked in the order of the silos' names: new state, Info."""
        ...


@runtime_checkable
class AlgorithmOptions(Protocol):
    """What a user chooses; `bind` makes the algorithm for a model."""

    def bind(self, model: StructuredModel) -> FederatedAlgorithm:
        """Make the five functions for a model."""
        ...
