"""The model's code: it is on every machine already, and all agree on its hash."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ..errors import OptionError, first_line
from ..model import StructuredModel


class Code:
    """A model that is named as `module:object`.

    Args:
        reference: `module:object`; the object is a StructuredModel or a function that takes nothing and returns one.
        folder: Where modules are looked for first, beside those that are installed.
    """

    def __init__(self, reference: str, folder: str | Path = "."):
        self.reference = reference
        look_in(folder)
        found = load_object("model", reference)
        if callable(found) and not isinstance(found, StructuredModel):
            found = found()
        if not isinstance(found, StructuredModel):
            raise OptionError(
                f"model: {reference!r} has type {type(found).__name__}; name a StructuredModel, or a function that "
                "makes it."
            )
        self.model: StructuredModel = found
        self.hash = source_hash(reference)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Code) and self.hash == other.hash and self.model is other.model

    def __hash__(self) -> int:
        return hash(self.hash)

    def neighbour(self, reference: str) -> Any:
        """An object of the same package: other modules are not imported because another machine says so."""
        own, other = (name.split(":")[0].split(".")[0] for name in (self.reference, reference))
        if not reference.partition(":")[2].isidentifier():
            raise OptionError(f"algorithm is {reference!r}; after the colon give the name of one object.")
        if own != other:
            raise OptionError(f"{reference!r} is not in the model's package {own!r}; put it there.")
        return load_object("algorithm", reference)


def look_in(folder: str | Path) -> None:
    """Have modules looked for in a folder first."""
    sys.path[:0] = [path for path in [str(Path(folder).resolve())] if path not in sys.path]


def load_object(what: str, reference: str) -> Any:
    """Import `module:object`."""
    module, _, name = reference.partition(":")
    if not name:
        raise OptionError(f"{what} is {reference!r}; give module:object, like mymodels.asthma:model.")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise OptionError(f"{what}: the module {module!r} cannot be imported ({first_line(error)}).") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionError(f"{what}: {module!r} has no {name!r}.")
        found = getattr(found, part)
    return found


def source_hash(reference: str) -> str:
    """Of all Python files of the package, and which object of it is meant."""
    digest = hashlib.sha256(reference.encode())
    top = reference.split(":")[0].split(".")[0]
    spec = importlib.util.find_spec(top)
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    files = [(path.relative_to(place).as_posix(), path) for place in places for path in sorted(place.rglob("*.py"))]
    if not places and spec and spec.origin:
        files = [(Path(spec.origin).name, Path(spec.origin))]
    for name, path in files:
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
