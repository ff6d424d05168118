"""Silos in the server's own process: everything of a deployed run but the network."""

import queue
from collections.abc import Callable, Mapping
from typing import Any

from .exchange import Lost
from .silo import Silo


class Direct:
    """Hands messages to silos of this process.

    Args:
        silos: By name.
        forgetful: Whether to treat them as new processes for every message.
        before: Called with name and request before a silo is asked; what it returns, if anything, is the answer.
        after: Called in the same way after the silo has answered.
    """

    def __init__(
        self,
        silos: Mapping[str, Silo],
        *,
        forgetful: bool = False,
        before: Callable[[str, bytes], Any] | None = None,
        after: Callable[[str, bytes], Any] | None = None,
    ):
        self.silos, self._forgetful = silos, forgetful
        self._before, self._after = before, after
        self._answers: queue.Queue = queue.Queue()

    @property
    def forgetful(self) -> bool:
        """As given."""
        return self._forgetful

    def send(self, name: str, request: bytes) -> None:
        """Ask at once."""
        answer = self._before(name, request) if self._before else None
        if answer is None:
            answer = self.silos[name].handle(request)
        if self._after:
            self._after(name, request)
        self._answers.put((name, answer))

    def receive(self, timeout: float) -> tuple[str, bytes | Lost] | None:
        """The next answer."""
        try:
            return self._answers.get(timeout=timeout)
        except queue.Empty:
            return None
