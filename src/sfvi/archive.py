"""Files: named arrays and a JSON header in one npz, written whole or not at all, read without pickle."""

import glob
import json
import os
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .errors import ArchiveError

HEADER = "__header__"
FORMAT = 1
Tree = TypeVar("Tree")


def write(path: str | os.PathLike, arrays: dict[str, Any], header: dict[str, Any]) -> None:
    """Write a file atomically: whoever reads `path`, at any moment, finds the old file or the new one, whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = json.dumps({"format": FORMAT, **header}, sort_keys=True).encode()
    contents = {name: np.asarray(array) for name, array in arrays.items()}
    contents[HEADER] = np.frombuffer(encoded, np.uint8)
    _sweep(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, allow_pickle=False, **contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def probe(path: Path) -> None:
    """Find out whether a file could be written there, making its folder, before work depends on it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.touch()
    temporary.unlink()
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder")


def _sweep(path):
    """Remove what processes that were killed while writing left behind."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        try:
            os.kill(int(part.name.split(".")[-2]), 0)
        except ProcessLookupError:
            part.unlink(missing_ok=True)
        except (PermissionError, ValueError):
            continue  # another user's process, or not a name of ours


def read(path: str | os.PathLike, *, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a file and check that it is whole and of the expected kind."""
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop(HEADER).tobytes())
    except FileNotFoundError:
        raise ArchiveError(f"There is no file {str(path)!r}.") from None
    except Exception as error:  # a flipped bit can break the archive in many ways
        raise ArchiveError(f"{str(path)!r} is damaged, or not a file that sfvi wrote.") from error
    if header.get("format") != FORMAT or header.get("kind") != kind:
        raise ArchiveError(
            f"{str(path)!r} holds a {header.get('kind')!r} of format {header.get('format')}; "
            f"expected a {kind!r} of format {FORMAT}."
        )
    return arrays, header


def flatten(tree: Any, *, prefix: str) -> dict[str, Any]:
    """Name every array leaf of a tree by its path."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {prefix + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def unflatten(template: Tree, arrays: dict[str, np.ndarray], *, prefix: str, path: Any) -> Tree:
    """Fill a tree of known structure with the arrays of a file: with all of them, and exactly those."""
    extra = {name for name in arrays if name.startswith(prefix)} - set(flatten(template, prefix=prefix))
    if extra:
        raise ArchiveError(
            f"{str(path)!r} does not fit: it holds {min(extra)} too; it was made with another model, data, family or "
            "optimizer."
        )

    def fill(key_path, leaf):
        name = prefix + jax.tree_util.keystr(key_path)
        array = arrays.get(name)
        if array is None or array.shape != jnp.shape(leaf) or array.dtype != jnp.result_type(leaf):
            found = "is missing" if array is None else f"is {array.dtype} of shape {array.shape}"
            raise ArchiveError(
                f"{str(path)!r} does not fit: {name} {found}, expected {jnp.result_type(leaf)} of shape "
                f"{jnp.shape(leaf)}; it was made with another model, data, family or optimizer."
            )
        return jnp.asarray(array)

    return jax.tree.map_with_path(fill, template)
