"""Running a study and keeping its result: whole, or not at all."""

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pandas as pd

from .. import archive, fitting
from ..errors import OptionError
from ..model.intake import text_columns
from ..results import Fit
from .study import FILE, Study, read


class Result(NamedTuple):
    """What came of a study.

    Attributes:
        fit: The fit.
        folder: Where it is kept.
        tables: The global posterior, by title.
        silos: Effects of the silos themselves, of a formula; else nothing.
        notes: What should be known of the data.
        remarks: What should be known of the run.
    """

    fit: Fit
    folder: Path
    tables: dict[str, pd.DataFrame]
    silos: pd.DataFrame
    notes: list[str]
    remarks: list[str]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, latents by name."""
        fit, found = self.fit, self.fit.convergence
        by_name = {name: row for table in self.tables.values() for name, row in _plain(table).items()}
        return {
            "folder": str(self.folder),
            "algorithm": str(fit.communication["algorithm"].iloc[-1]),
            "rounds": len(fit.elbo),
            "seconds": fit.seconds,
            "converged": None if found is None else found.converged,
            "diagnosed": False,
            "verdicts": [*([] if found is None else [found.verdict]), *self.remarks],
            "notes": self.notes,
            "summary": by_name,
            "silos": _plain(self.silos),
        }


def run(
    study: Study,
    folder: Path,
    *,
    checkpoint: Path | None = None,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Fit, summarize and keep.

    Args:
        study: What to fit.
        folder: For the result: a new or empty one, or that of the same study.
        checkpoint: As in `sfvi.fit`.
        progress: As in `sfvi.fit`.
        say: Called with a sentence when the input is read and the long part begins.
    """
    folder = Path(folder)
    replaces = _check_output(folder, study, checkpoint)
    with jax.enable_x64(study.precision == "float64"), _heard() as remarks:
        options: dict[str, Any] = {
            "key": study.key,
            "algorithm": study.chosen(),
            "num_rounds": study.num_rounds,
            "until_converged": study.until_converged,
            "checkpoint": checkpoint,
            "progress": progress,
        }
        if study.formula is None:
            agreement, effects = None, pd.DataFrame()
            fit, notes = _fit_model(study, options, say)
            tables = {"Global latents": fit.posterior.summary()}
        else:
            glmm = study.glmm()
            say(_begun(study))
            agreement, found = glmm.agreement, glmm.fit(**options)
            fit, summary = found.fit, found.summary()
            tables, effects, notes = summary.tables, summary.silos, summary.notes
        _keep(folder, fit, lambda place: study.write(place, agreement))
    if replaces:
        remarks.append(f"{str(folder)!r} held the result of the same command already; it has been replaced.")
    return Result(fit, folder, tables, effects, notes, remarks)


def _begun(study):
    rounds = "" if study.num_rounds is None else f", {study.num_rounds:,} rounds"
    return f"Fitting {len(study.silos)} silo{'' if len(study.silos) == 1 else 's'}{rounds}; this may take minutes."


def _fit_model(study, options, say):
    code, inputs = study.code(), study.inputs()
    model = code.model
    say(_begun(study))
    told = {
        field: {name: getattr(found, field) for name, found in inputs.items() if getattr(found, field) is not None}
        for field in ("unit_ids", "num_units")
    }
    given = {field: found or None for field, found in told.items()}
    fit = fitting.fit(model, {name: found.data for name, found in inputs.items()}, **given, **options)
    text = {name: text_columns(found.data) for name, found in inputs.items()}
    notes = [
        f"Silo {name}: columns of text, which the program does not see: {', '.join(c)}" for name, c in text.items() if c
    ]
    return fit, notes


@contextlib.contextmanager
def _heard():
    """Collect the sentences that a fit warns with; other warnings go their way."""
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        show = warnings.showwarning

        def hear(message, category, *args, **kwargs):
            if category is UserWarning:
                said.append(str(message))
            else:
                show(message, category, *args, **kwargs)

        warnings.showwarning = hear
        yield said


def _check_output(folder, study, checkpoint):
    """Refuse a folder that holds something else, before anything is computed; say whether it holds this very study."""
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"--output {str(folder)!r} is a file; name a folder.")
    archive.probe(folder.parent / FILE)
    inside = set(folder.iterdir()) if folder.is_dir() else set()
    if checkpoint is not None:
        inside -= {path for path in inside if path.name.startswith(Path(checkpoint).name)}
    if not inside:
        return False
    known = read(folder)
    if known is None:
        raise OptionError(f"--output {str(folder)!r} holds something else already; name a new folder.")
    if known[0].plain() != study.plain():
        raise OptionError(f"--output {str(folder)!r} holds another fit; name a new folder, or remove that one.")
    return True


def _keep(folder, fit, describe):
    """Write beside the folder, then put everything in its place; the description comes last."""
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        fit.save(beside)
        describe(beside)
        if not folder.exists() or not any(folder.iterdir()):
            os.replace(beside, folder)
            return
        (folder / "silos").mkdir(exist_ok=True)
        made = sorted((path for path in beside.rglob("*") if path.is_file()), key=lambda path: path.name == FILE)
        for path in made:
            os.replace(path, folder / path.relative_to(beside))
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _plain(table):
    """Rows by name, numbers that JSON has: what is not a number is left out."""
    names = [", ".join(name) if isinstance(name, tuple) else str(name) for name in table.index]
    return {
        name: {str(column): float(value) for column, value in row.items() if value == value}
        for name, (_, row) in zip(names, table.iterrows(), strict=True)
    }
