"""The diagnosis of a result, kept beside it: for reports, as long as the result is the one that was diagnosed."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from .. import archive, results
from .._random import as_key
from ..deploy.ledger import write_text
from ..diagnostics import Diagnosis, ImportanceCheck, OptimumCheck, RoundsCheck
from ..posterior import GlobalPosterior
from ..posterior.of_globals import GLOBAL_KIND

FILE = "diagnosis.json"
FORMAT = 1
CHECKS: dict[str, Any] = {check.__name__: check for check in (RoundsCheck, OptimumCheck, ImportanceCheck)}


class Kept(NamedTuple):
    """A diagnosis of the global posterior on file.

    Attributes:
        diagnosis: What was found.
        silos: Whose data were there.
        made: When, in words.
        path: The file.
    """

    diagnosis: Diagnosis
    silos: frozenset[str]
    made: str
    path: Path


def keep(run: Path, diagnosis: Diagnosis, silos: Sequence[str]) -> Path | None:
    """Write the diagnosis of a result beside it, if one may write there; one made with more silos' data stays.

    Args:
        run: The folder of the result.
        diagnosis: What `Fit.diagnose` returned.
        silos: Whose data were there.
    """
    path, of = run / FILE, _digest(run)
    known = _content(path)
    if known is not None and known["of"] == of and set(known["silos"]) > set(silos):
        return path
    content = {
        "format": FORMAT,
        "sfvi": version("sfvi"),
        "of": of,
        "silos": sorted(silos),
        "made": datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0"),
        "checks": [_plain(check) for check in diagnosis.checks],
        "notes": list(diagnosis.notes),
    }
    try:
        write_text(path, json.dumps(content))
    except PermissionError:
        return None
    return path


def find(run: Path, posterior: GlobalPosterior, silos: Sequence[str]) -> Kept | None:
    """The diagnosis beside a result; None if there is none, of this fit, with the data of at least these silos.

    Args:
        run: The folder of the result.
        posterior: The global posterior in it.
        silos: Whose data are here.
    """
    content = _content(run / FILE)
    if content is None or content["of"] != _digest(run) or not set(silos) <= set(content["silos"]):
        return None
    checks = tuple(_check(plain, posterior) for plain in content["checks"])
    return Kept(Diagnosis(checks, tuple(content["notes"])), frozenset(content["silos"]), content["made"], run / FILE)


def _content(path):
    """What a file says; None for one that is missing, damaged or of another version: it can be made again."""
    try:
        content = json.loads(path.read_text())
        known = content["format"] == FORMAT and content["sfvi"] == version("sfvi")
        return content if known and {"of", "silos", "made", "checks", "notes"} <= set(content) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(run):
    """What the fit in a folder is: the same for the same numbers, whenever they were written."""
    found = hashlib.sha256()
    for name, kind in (("global.npz", GLOBAL_KIND), ("fit.npz", results.FIT_KIND)):
        arrays, header = archive.read(run / name, kind=kind)
        found.update(json.dumps(header, sort_keys=True).encode())
        for key in sorted(arrays):
            found.update(f"{key} {arrays[key].dtype} {arrays[key].shape}".encode())
            found.update(np.ascontiguousarray(arrays[key]).tobytes())
    return found.hexdigest()


def _plain(check):
    values = {field.name: getattr(check, field.name) for field in dataclasses.fields(check)}
    if isinstance(check, ImportanceCheck):
        del values["posterior"]
    return {"kind": type(check).__name__, **{name: _encoded(value) for name, value in values.items()}}


def _check(plain, posterior):
    values = {name: _decoded(value) for name, value in plain.items() if name != "kind"}
    if plain["kind"] == "ImportanceCheck":
        values["posterior"] = posterior
    return CHECKS[plain["kind"]](**values)


def _encoded(value):
    if isinstance(value, pd.DataFrame):
        return {"table": value.to_dict("split")}
    if isinstance(value, jax.Array):
        return {"key": jax.random.key_data(value).tolist()}
    return {"array": value.tolist()} if isinstance(value, np.ndarray) else value


def _decoded(value):
    if not isinstance(value, dict):
        return value
    if "key" in value:
        return as_key(np.array(value["key"], np.uint32))
    return pd.DataFrame(**value["table"]) if "table" in value else np.array(value["array"])
