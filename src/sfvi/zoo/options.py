"""What options of models may be."""

import math
from typing import Any

from ..errors import OptionError


def check_sizes(model: str, *, least: int = 1, **sizes: Any) -> None:
    """Refuse sizes that are none; those that are None are left open."""
    for option, value in sizes.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise OptionError(f"{model}: {option} is {value!r}; give a whole number of at least {least}.")


def check_numbers(model: str, *, above: float, below: float = math.inf, **numbers: Any) -> None:
    """Refuse what is no number between two others."""
    for option, value in numbers.items():
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not above < value < below:
            bounds = [
                f"{word} {bound:g}" for word, bound in (("above", above), ("below", below)) if math.isfinite(bound)
            ]
            raise OptionError(f"{model}: {option} is {value!r}; give a number {' and '.join(bounds)}".rstrip() + ".")


def check_flags(model: str, **flags: Any) -> None:
    """Refuse what is neither true nor false."""
    for option, value in flags.items():
        if not isinstance(value, bool):
            raise OptionError(f"{model}: {option} is {value!r}; give True or False.")
