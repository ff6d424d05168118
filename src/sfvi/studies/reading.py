"""Reading a result again: for a report, and to find out how far to trust it."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import pandas as pd

from .. import archive, results
from ..deploy import data
from ..deploy.code import Code, load_object, look_in
from ..deploy.spec import choose
from ..diagnostics.verdicts import Diagnosis, worst
from ..errors import OptionError
from ..families import Amortized
from ..formula import Agreement, glmm_groups, glmm_model, name_groups
from ..model import StructuredModel
from ..posterior import SiloPosterior
from ..results import Fit
from . import keeping
from . import study as studies

Say = Callable[[str], None]
LONG = "Diagnosing the global posterior; this may take minutes."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where model and data of a result are, as far as its folder does not say.

    Args:
        silos: For each silo whose part is wanted a file or `module:function`, see `deploy.data.read`.
        model: `module:object`.
        algorithm: `module:object`, where the fit had an inference network.
        unit_ids: The column that holds the units' ids.
        app_dir: Where modules are looked for beside those installed.
        precision: "float32" or "float64".
    """

    silos: dict[str, str] = dataclasses.field(default_factory=dict)
    model: str | None = None
    algorithm: str | None = None
    unit_ids: str | None = None
    app_dir: str | None = None
    precision: str | None = None


class Judged(NamedTuple):
    """How far to trust a result.

    Attributes:
        fit: Of the global posterior; None for a silo's own file.
        silos: Of each silo's latents, where its data were given.
    """

    fit: Diagnosis | None
    silos: dict[str, Diagnosis]

    @property
    def trust(self) -> str:
        """The worst of all."""
        return worst([found.trust for found in [self.fit, *self.silos.values()] if found is not None])

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        silos = {name: _plain(found) for name, found in self.silos.items()}
        return {"trust": self.trust, "fit": None if self.fit is None else _plain(self.fit), "silos": silos}


class Reports(NamedTuple):
    """Reports that were written.

    Attributes:
        paths: The files.
        diagnosis: Which diagnosis of the global posterior they show, in a sentence.
        kept: The file of that diagnosis; None if there is none.
    """

    paths: list[Path]
    diagnosis: str
    kept: Path | None


def report(
    run: Path,
    source: Source,
    output: Path | None = None,
    *,
    diagnosed: bool = True,
    say: Say = lambda _: None,
) -> Reports:
    """Write the report of a result, and one for each silo whose data are given.

    The diagnosis of the global posterior is the one beside the result, if it is of this fit and was made with the data
    of the silos given; otherwise it is made now and kept there. Those of silos are made now: they hold units' ids,
    which are in no file.

    Args:
        run: A folder that `sfvi fit`, `sfvi run` or `Fit.save` wrote, or a silo's own file.
        source: Where model and data are.
        output: The report's file; a silo's has the silo's name added. By default beside the result.
        diagnosed: Whether the reports show diagnoses at all.
        say: Called with a sentence before what takes long.
    """
    run = Path(run)
    place = output or (run / "report.html" if run.is_dir() else run.with_suffix(".html"))
    with _opened(run, source) as (fit, silos):
        made, found, said, kept = [], None, "The report has no diagnosis.", None
        if fit is not None:
            if diagnosed:
                found, said, kept = _diagnosis(run, fit, say)
            fit.report(place, diagnosis=found or False)
            made.append(place)
        elif diagnosed:
            said = "The diagnosis is of this silo alone; that of the global posterior is at the server."
        for name, silo in silos.items():
            say(f"Writing the report of silo {name}." if not diagnosed else f"Diagnosing silo {name}.")
            own = place if fit is None else place.with_stem(f"{place.stem}-{quote(name, safe='')}")
            silo.report(own, diagnosis=None if diagnosed else False, global_diagnosis=found)
            made.append(own)
        return Reports(made, said, kept)


def _diagnosis(run, fit, say):
    """The diagnosis of a fit, which it is in a sentence, and its file."""
    known = keeping.find(run, fit.posterior, fit.silo_names)
    if known is not None:
        names = ", ".join(check.name for check in known.diagnosis.checks)
        said = f"The diagnosis ({names}) is that of {known.made}, of this fit, in {known.path}."
        return known.diagnosis, said, known.path
    say(LONG)
    found = fit.diagnose()
    path = keeping.keep(run, found, fit.silo_names)
    return found, f"The diagnosis was made now{'.' if path is None else f' and is kept in {path}.'}", path


def diagnose(run: Path, source: Source, *, say: Say = lambda _: None) -> Judged:
    """Find out how far to trust a result, and keep what is found of the global posterior; arguments as in `report`."""
    with _opened(Path(run), source) as (fit, silos):
        found = None
        if fit is not None:
            say(LONG)
            found = fit.diagnose()
            keeping.keep(Path(run), found, fit.silo_names)
        judged = {}
        for name, silo in silos.items():
            say(f"Diagnosing silo {name}.")
            judged[name] = silo.diagnose()
        return Judged(found, judged)


@contextlib.contextmanager
def _opened(run: Path, source: Source) -> Iterator[tuple[Fit | None, dict[str, SiloPosterior]]]:
    """The fit, or None for a silo's own file, and the silos whose data are given; in the precision of the fit."""
    if not run.exists():
        raise OptionError(f"There is no {str(run)!r}; name a folder that sfvi fit, sfvi run or Fit.save wrote.")
    places = [run] if run.is_dir() else [run.parent, run.parent.parent]  # a silo's file is in a folder of its own
    study, agreement = next(filter(None, map(studies.read, places)), (None, None))
    precision = source.precision or (study.precision if study else "float32")
    studies.check_precision(precision)
    look_in(source.app_dir or (study.app_dir if study else "."))
    with jax.enable_x64(precision == "float64"):
        model, agreement = _model(run, source, study, agreement)
        network = _network(source, study)
        unit_ids = source.unit_ids or (study.unit_ids if study else None)
        inputs = {name: data.read(name, place, unit_ids=unit_ids) for name, place in source.silos.items()}
        missing = study.missing if study else "error"
        arrays = studies.arrays(inputs, agreement, missing)
        if run.is_dir():
            fit = _load(run, model, arrays, network)
            silos = {name: fit.silo(name) for name in arrays}
        else:
            fit, silos = None, {name: _own(run, name, model, found, network) for name, found in _single(run, arrays)}
        if agreement is not None:
            for name, silo in silos.items():
                name_groups(silo, glmm_groups(inputs[name].data, agreement, silo=name, missing=missing))
        yield fit, silos


def _model(run, source, study, agreement) -> tuple[StructuredModel, Agreement | None]:
    """What is named, or else what the folder says; a formula's agreement only with its own model."""
    if source.model is not None:
        return Code(source.model, source.app_dir or (study.app_dir if study else ".")).model, None
    if agreement is not None:
        return glmm_model(agreement), agreement
    if study is None:
        raise OptionError(f"{str(run)!r} does not say which model made it; give --model module:object.")
    return study.code().model, None


def _network(source, study):
    """The local family of the algorithm, where it is an inference network."""
    reference = source.algorithm or (study.algorithm if study else "SFVI")
    if ":" not in reference:
        return None
    options: Any = choose(reference, {}, lambda name: load_object("algorithm", name))
    return options.local_family if isinstance(options.local_family, Amortized) else None


def _load(run, model, arrays, network):
    _, header = archive.read(run / "fit.npz", kind=results.FIT_KIND)
    unknown = [name for name in arrays if name not in header["silos"]]
    if unknown:
        raise OptionError(f"--silo {unknown[0]}: the fit in {str(run)!r} is of {', '.join(header['silos'])}.")
    if arrays and not (run / "silos").is_dir():
        raise OptionError(
            f"{str(run)!r} holds the global posterior alone; a silo's own is at the silo: name its file posterior.npz."
        )
    return results.load(run, model, arrays, local_family=network)


def _single(run, arrays):
    if len(arrays) != 1:
        raise OptionError(f"{str(run)!r} is one silo's file; give that silo's data, --silo NAME=FILE.")
    return arrays.items()


def _own(run, name, model, found, network):
    silo = SiloPosterior.load(run, model, found, local_family=network)
    if silo.name != name:
        raise OptionError(f"--silo {name}: {str(run)!r} belongs to silo {silo.name!r}.")
    return silo


def _plain(found):
    return {
        "trust": found.trust,
        "checks": [{"name": c.name, "trust": c.trust, "verdict": c.verdict, **_figures(c)} for c in found.checks],
        "notes": list(found.notes),
    }


def _figures(check):
    """A check's own numbers and tables, those as a list of rows; None where there is no number."""
    numbers = {name: _number(value) for name, value in vars(check).items() if isinstance(value, bool | int | float)}
    tables = {name: _rows(value) for name, value in vars(check).items() if isinstance(value, pd.DataFrame)}
    return numbers | tables


def _rows(table):
    named = any(name is not None for name in table.index.names)
    names = table.index.to_frame(index=False) if named else pd.DataFrame({"coordinate": table.index})
    whole = table.reset_index(drop=True)
    if named or not isinstance(table.index, pd.RangeIndex):
        whole = pd.concat([names, whole], axis=1)
    return [{str(column): _number(value) for column, value in row.items()} for row in whole.to_dict("records")]


def _number(value):
    value = value.item() if hasattr(value, "item") else value
    return value if not isinstance(value, float) or math.isfinite(value) else None
