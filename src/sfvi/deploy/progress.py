"""A deployed run on the operator's terminal; quiet where there is none."""

import sys
from typing import Any

from rich.console import Console
from rich.status import Status

from . import status


class Screen:
    """Shows the latest status in one line that changes."""

    def __init__(self):
        self._line = Status("connecting", console=Console(stderr=True)) if sys.stderr.isatty() else None

    def __enter__(self) -> "Screen":
        if self._line is not None:
            self._line.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._line is not None:
            self._line.stop()

    def show(self, state: dict[str, Any]) -> None:
        """Say where the run stands."""
        if self._line is not None:
            self._line.update(status.line(state))
