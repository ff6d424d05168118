"""Settings of experiments: `experiments/<name>/spec.toml`."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from ..errors import OptionError

FILE = "spec.toml"


def names(folder: Path) -> list[str]:
    """Experiments that have a specification in a folder."""
    return sorted(path.parent.name for path in Path(folder).glob(f"*/{FILE}"))


def read(folder: Path, kind: type, preset: str) -> Any:
    """Make an experiment from its specification.

    Args:
        folder: Of the experiment.
        kind: Its class, a dataclass: its fields are the settings, and all of them must be given.
        preset: Which of its presets.
    """
    path = folder / FILE
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise OptionError(
            f"There is no {path}; run this from the root of the repository, or say where it is with --folder."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{path} cannot be read: {error}.") from error
    presets = content.get("presets", {})
    if preset not in presets:
        raise OptionError(f"{path} has no preset {preset!r}; choose one of {', '.join(sorted(presets))}.")
    settings = presets[preset]
    expected = {field.name for field in dataclasses.fields(kind)}
    for name in sorted(expected ^ set(settings)):
        what = "is not a setting of this experiment; remove it" if name in settings else "is missing; add it"
        raise OptionError(f"{path}: {name!r} {what} (preset {preset!r}).")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})
