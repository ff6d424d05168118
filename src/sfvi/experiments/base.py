"""What an experiment is: cells to be filled one by one, and a report of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import DivergenceError
from ..fitting import fit
from ..model import StructuredModel
from ..results import Fit

Result = dict[str, Any]  # JSON
Results = Mapping[str, Result]  # by name of the cell


class Cell(NamedTuple):
    """One run of one method.

    Attributes:
        name: Of the cell, unique in its experiment, like "19 silos / Sites / seed 0".
        settings: All that decides its result, as JSON; where they have changed, the cell is filled again.
        run: Fills it; given a file where a long run may keep its state.
    """

    name: str
    settings: dict[str, Any]
    run: Callable[[Path], Result]


class Experiment(Protocol):
    """A table or figure; its fields are the settings of a preset, as they stand in `spec.toml`."""

    def cells(self) -> list[Cell]:
        """All cells, in the order in which they are filled."""
        ...

    def report(self, results: Results) -> str:
        """Tables in Markdown of the cells that are filled."""
        ...

    def draw(self, results: Results, path: Path) -> None:
        """Draw the picture, a PNG file."""
        ...


def attempt(model: StructuredModel, silos: Mapping[str, Any], **options: Any) -> tuple[Fit, Result]:
    """`sfvi.fit`; of a run that diverges the last good state, and in which round it broke."""
    try:
        return fit(model, silos, **options), {}
    except DivergenceError as error:
        reached: Any = error.fit
        return reached, {"broke": error.round}


def name(*parts: Any) -> str:
    """The name of a cell from its parts."""
    return " / ".join(map(str, parts))


def markdown(columns: list[str], rows: list[list[str]], *, names: int = 1) -> str:
    """A table; the first columns, with names, to the left, the others to the right."""
    lines = [columns, ["---"] * names + ["---:"] * (len(columns) - names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
