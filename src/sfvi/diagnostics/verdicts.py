"""What a check says: how far to trust, and why, in a sentence."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, Protocol

Trust = Literal["fine", "doubtful", "do not trust"]
LEVELS: tuple[Trust, ...] = ("fine", "doubtful", "do not trust")


class Check(Protocol):
    """A check of a posterior; its own figures come on top.

    Attributes:
        name: Which check it is.
        trust: How far to trust the posterior, as far as this check can tell.
        verdict: Why, in a plain sentence.
    """

    @property
    def name(self) -> str:
        """See above."""
        ...

    @property
    def trust(self) -> Trust:
        """See above."""
        ...

    @property
    def verdict(self) -> str:
        """See above."""
        ...


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All checks of a posterior; print it.

    Attributes:
        checks: Each with `name`, `trust`, `verdict` and its own figures.
        notes: What was not checked, and why.
    """

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def trust(self) -> Trust:
        """The worst of its checks."""
        return worst([check.trust for check in self.checks])

    def __getitem__(self, name: str) -> Check:
        """A check by its name."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"There is no check {name!r}; there are {', '.join(check.name for check in self.checks)}.")

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [f"{check.name:<{width}}  {check.verdict}" for check in self.checks]
        return "\n".join([f"{self.trust[:1].upper()}{self.trust[1:]}.", *lines, *self.notes])


def worst(levels: Sequence[Trust]) -> Trust:
    """The worst level of several; without any nothing is known, which is doubtful."""
    return LEVELS[max(map(LEVELS.index, levels))] if levels else "doubtful"


def percent(log_ratio: float) -> str:
    """By how much something is larger, from the logarithm of the ratio."""
    value = 100 * math.expm1(min(log_ratio, 20.0))
    return f"{value:,.0f}%" if value >= 10 else f"{value:.2g}%"


def say(trust: Trust, why: str) -> str:
    """A verdict: the level, then the reason."""
    return f"{trust[:1].upper()}{trust[1:]}: {why}"
