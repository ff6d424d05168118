"""Telling a person how a long run is doing."""

import sys
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class RunProgress(NamedTuple):
    """Where a run stands; what a `callback` receives.

    Attributes:
        round: Rounds done.
        num_rounds: Rounds asked for.
        elbo: Mean ELBO estimate of the latest rounds.
        rounds_per_second: Rate of the latest rounds; 0 after the first call, which compiles.
        seconds_left: Estimate at that rate; NaN while there is none.
    """

    round: int
    num_rounds: int
    elbo: float
    rounds_per_second: float
    seconds_left: float


Report = Callable[[RunProgress], None]


class ProgressBar:
    """A bar on the terminal; nothing at all where standard error is none, or `show` is False."""

    def __init__(self, num_rounds: int, *, show: bool | None = None):
        self._bar = None
        if sys.stderr.isatty() if show is None else show:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} rounds"),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("sfvi", total=num_rounds, text="compiling")

    def __enter__(self):
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.stop()

    def update(self, progress: RunProgress) -> None:
        """Show where the run stands."""
        if self._bar is not None:
            rate = f"{progress.rounds_per_second:,.0f}/s" if progress.rounds_per_second else "compiled"
            text = f"{rate}  ELBO {progress.elbo:,.2f}"
            self._bar.update(self._task, completed=progress.round, text=text)
