"""Taking a silo's units apart, for algorithms that bound what each contributes."""

import dataclasses

from .._types import Theta
from ..errors import OptionError
from ..model import SiloData, StructuredModel
from .exactness import sums_up


def take_apart(model: StructuredModel, name: str, data: SiloData, theta: Theta) -> SiloData:
    """Give a silo's data the way to take its units one by one, tried by value and gradient.

    Args:
        model: The model.
        name: The silo.
        data: Its data.
        theta: Any value of the trainable parameters.
    """
    for way in model.ways_apart(name, data):
        if sums_up(data, way, theta):
            return dataclasses.replace(data, apart=way)
    raise OptionError(
        f"UnitPrivacy: what the program of silo {name!r} computes is not a sum over its units, each from its own data "
        "(as when it takes a mean over all of them), so nobody's part can be bounded; compute such things beforehand, "
        "or use SiloPrivacy."
    )
