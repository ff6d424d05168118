"""What silos have without exchanges: each its own posterior, its own frequencies; and all rows in one place."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import OptionError
from ..model import StructuredModel
from .stacking import position_of, stack, stack_labelled


def each_alone(model: StructuredModel) -> StructuredModel:
    """The same model with nothing shared: every silo has latents of the population of its own.

    One run of `fit` then fits all silos, each by itself.

    Args:
        model: Without trainable parameters in the population program, which silos would share.
    """
    if model.population.layout.size == 0:
        raise OptionError("each_alone: the population program has no latents, so nothing is shared; fit the model.")

    def alone(program):
        def silo(nothing, data):
            del nothing
            return program(model.population.program(), data)

        return silo

    program = model.silo_program
    if isinstance(program, Mapping):
        return StructuredModel(lambda: None, {name: alone(each) for name, each in program.items()}, check=model.check)
    return StructuredModel(lambda: None, alone(program), check=model.check)


def pooled(silos: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of all silos as those of one, `all`.

    Args:
        silos: Data by name: dicts of arrays with the rows on the first axis.
    """
    stack("pooled", silos)  # refuses what does not fit together
    first = next(iter(silos.values()))
    return {"all": {part: np.concatenate([np.asarray(data[part]) for data in silos.values()]) for part in first}}


class Majority:
    """What `majority` found: the frequencies of classes in each silo."""

    def __init__(self, frequencies: Mapping[str, np.ndarray]):
        self.frequencies = dict(frequencies)

    def predict(self, silo: str, x: Any) -> np.ndarray:
        """Probabilities for new rows of a silo: the same for all."""
        position_of(silo, list(self.frequencies))
        return np.tile(self.frequencies[silo], (len(x), 1))


def majority(silos: Mapping[str, Any], *, num_classes: int) -> Majority:
    """The rule that always says a silo's most frequent class.

    Args:
        silos: `{"x": features, one row each, "y": classes}` by name.
        num_classes: How many there are.
    """
    stack_labelled("majority", silos, num_classes)
    counts = {name: np.bincount(data["y"], minlength=num_classes) for name, data in silos.items()}
    return Majority({name: each / each.sum() for name, each in counts.items()})
