"""A silo's record for people: a table of what left."""

from collections.abc import Sequence
from typing import Any

from .record import Chain

HEADER = ("line", "time", "run", "step", "kind", "what", "bytes", "epsilon")
LONGEST = 400  # characters of a cell


def entries(chain: Chain, *, run: str | None = None, last: int | None = None) -> list[dict[str, Any]]:
    """What the lines say, with their numbers.

    Args:
        chain: The record.
        run: Only of this run.
        last: Only so many, the last ones.
    """
    found = [{"line": number, **entry} for number, entry in enumerate(chain.entries, start=1)]
    found = [entry for entry in found if run is None or entry.get("run") == run]
    return found if last is None else found[max(0, len(found) - last) :]


def rows(chain: Chain, *, run: str | None = None, last: int | None = None) -> list[list[str]]:
    """The same as a table, a row for each line, in columns of `HEADER`."""
    return [_row(entry) for entry in entries(chain, run=run, last=last)]


def verdict(chain: Chain, holds: str | None = None) -> tuple[bool, str]:
    """Whether a record is whole, and a sentence about it; `holds` is the hash that one of its lines must have."""
    if chain.broken is not None:
        return False, (
            f"The record is broken at line {chain.broken}: {chain.why}. The silo sends nothing until the file is "
            "restored from a backup."
        )
    if holds is not None and holds not in chain.hashes:
        return False, f"The lines follow on each other, but none has the hash {holds}: some were cut off or rewritten."
    return True, f"The record is whole: {len(chain.entries)} lines, each with the hash of the one before."


def _row(entry):
    refused = entry.get("event") == "refused"
    epsilon = entry.get("epsilon")
    cells: Sequence[Any] = (
        entry["line"],
        entry.get("time", ""),
        entry.get("run", ""),
        entry.get("step", ""),
        "refused" if refused else entry.get("kind", ""),
        entry.get("reason", "") if refused else _contents(entry),
        entry.get("bytes", ""),
        f"{epsilon:.4g}" if isinstance(epsilon, int | float) else "",
    )
    return [_plain(cell) for cell in cells]


def _contents(entry):
    """Names of fields; names, shapes and norms of arrays, as far as they have entries."""
    arrays, fields = entry.get("arrays"), entry.get("fields")
    parts = [str(name) for name in fields] if isinstance(fields, list) else []
    for name, about in arrays.items() if isinstance(arrays, dict) else ():
        shape, norm = (about.get(what) for what in ("shape", "norm")) if isinstance(about, dict) else (None, None)
        if isinstance(shape, list) and 0 in shape:
            continue
        size = "x".join(map(str, shape)) if isinstance(shape, list) else "?"
        length = f" norm {norm:.3g}" if isinstance(norm, int | float) else ""
        parts.append(f"{name}[{size}]{length}")
    return ", ".join(parts)


def _plain(cell):
    """Without what could move a terminal's cursor, and of texts that others may have written only the beginning."""
    text = str(cell)
    shown = "".join(character if character.isprintable() else "?" for character in text[:LONGEST])
    return shown if len(text) <= LONGEST else shown + "…"
