"""What a fit on one machine is: plain values, which say where model and data are."""

import dataclasses
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from .. import formula as formulas
from ..algorithms import AlgorithmOptions
from ..deploy import data
from ..deploy.code import Code, load_object, look_in
from ..deploy.ledger import write_text
from ..deploy.site import PRECISIONS
from ..deploy.spec import choose
from ..errors import ArchiveError, DataError, OptionError
from ..formula import Agreement, Glmm

FILE = "study.json"
FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A fit, described.

    Args:
        silos: For each silo a file or `module:function`, see `deploy.data.read`.
        model: `module:object`; None with a formula.
        formula: As in `sfvi.glmm`; None with a model.
        family: Of the formula.
        missing: Of the formula.
        standardize: Of the formula.
        unit_ids: The column that holds the units' ids.
        app_dir: Where modules are looked for beside those installed.
        algorithm: "SFVI", "SFVIAvg" or "Sites"; or "module:object".
        options: Of the algorithm, as far as they are numbers or text.
        key: Of all randomness.
        num_rounds: Rounds; by default what mostly suffices for the algorithm.
        until_converged: Stop when the result no longer moves.
        precision: "float32" or "float64".
    """

    silos: dict[str, str]
    model: str | None = None
    formula: str | None = None
    family: str | None = None
    missing: str = "error"
    standardize: bool = True
    unit_ids: str | None = None
    app_dir: str = "."
    algorithm: str = "SFVI"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    key: int = 0
    num_rounds: int | None = None
    until_converged: bool = False
    precision: str = "float32"

    def __post_init__(self):
        if (self.model is None) == (self.formula is None):
            raise OptionError("Say what to fit: either --model module:object or --formula 'outcome ~ predictors'.")
        if (self.formula is None) != (self.family is None):
            raise OptionError(
                "--formula needs --family, like --family bernoulli."
                if self.family is None
                else "--family goes with --formula; a model has its own distributions."
            )
        if self.formula is None and (self.missing != "error" or not self.standardize):
            raise OptionError("--missing and --no-standardize go with --formula; a model's loader does it for itself.")
        if self.formula is not None and self.unit_ids is not None:
            raise OptionError("--unit-ids goes with --model; the units of a formula are its groups.")
        check_precision(self.precision)
        if not self.silos:
            raise OptionError("Say where the data are: --silo NAME=FILE for each silo.")

    def chosen(self) -> AlgorithmOptions:
        """The algorithm's options."""
        look_in(self.app_dir)
        return choose(self.algorithm, self.options, lambda reference: load_object("algorithm", reference))

    def code(self) -> Code:
        """The model that is named."""
        assert self.model is not None
        return Code(self.model, self.app_dir)

    def glmm(self) -> Glmm:
        """The model of the formula, with the silos' rows."""
        assert self.formula is not None
        assert self.family is not None
        frames = {name: rows(name, found.data) for name, found in self.inputs().items()}
        return formulas.glmm(
            self.formula, family=self.family, silos=frames, standardize=self.standardize, missing=self.missing
        )

    def inputs(self) -> dict[str, data.SiloInput]:
        """The silos' data."""
        look_in(self.app_dir)
        return {name: data.read(name, source, unit_ids=self.unit_ids) for name, source in self.silos.items()}

    def write(self, folder: Path, agreement: Agreement | None) -> None:
        """Keep it beside the result, with what silos agreed on about a formula."""
        agreed = None if agreement is None else agreement.to_json()
        content = {"format": FORMAT, "sfvi": version("sfvi"), "study": self.plain(), "agreement": agreed}
        write_text(folder / FILE, json.dumps(content, indent=1))

    def plain(self) -> dict[str, Any]:
        """As values that survive JSON; the place of modules as a path that holds anywhere on this machine."""
        values = {**dataclasses.asdict(self), "app_dir": str(Path(self.app_dir).resolve())}
        return json.loads(json.dumps(values))


def read(folder: Path) -> tuple[Study, Agreement | None] | None:
    """The study that a folder's result belongs to; None if nothing is said there."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
        agreed = content["agreement"]
        return Study(**content["study"]), None if agreed is None else Agreement.from_json(agreed)
    except (ValueError, KeyError, TypeError) as error:
        raise ArchiveError(
            f"{str(path)!r} is damaged, or of another version of sfvi; remove it and say --model and --precision."
        ) from error


def rows(name: str, found: Any) -> pd.DataFrame:
    """What a silo has, if that is a table, as formulas need."""
    if not isinstance(found, pd.DataFrame):
        raise DataError(
            f"Silo {name!r} has a {type(found).__name__}; with a formula give a .csv or .parquet file, or a function "
            "that returns a pandas DataFrame."
        )
    return found


def check_precision(precision: str) -> None:
    """Refuse other names than those of the two precisions."""
    if precision not in PRECISIONS:
        raise OptionError(f"precision is {precision!r}; choose {' or '.join(PRECISIONS)}.")


def arrays(silos: Mapping[str, data.SiloInput], agreement: Agreement | None, missing: str) -> dict[str, Any]:
    """What the silos' programs take."""
    if agreement is None:
        return {name: found.data for name, found in silos.items()}
    return {
        name: formulas.glmm_arrays(rows(name, found.data), agreement, silo=name, missing=missing)
        for name, found in silos.items()
    }
