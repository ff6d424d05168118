"""The page: one HTML file with its style and pictures inside, which asks nobody for anything."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from ..errors import OptionError
from ..provenance import versions
from .html import Html, join, section, tag

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # a browser that is told to fetch refuses


class Section(NamedTuple):
    """A part of a report: the name of its anchor, its heading and what it says."""

    anchor: str
    title: str
    content: Html


def page(*, kind: str, title: str, lead: Html, sections: Sequence[Section]) -> Html:
    """A whole report.

    Args:
        kind: What report it is, in a few words.
        title: Its heading.
        lead: What comes first: verdict and summary.
        sections: The parts, in order.
    """
    style = files("sfvi.report").joinpath("style.css").read_text("utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="robots", content="noindex"),
        tag("title", title),
        Html(f"<style>\n{style}</style>"),
    )
    links = [tag("li", tag("a", part.title, href=f"#{part.anchor}")) for part in sections]
    top = tag("header", tag("p", kind, class_="kind"), tag("h1", title), lead)
    contents = tag("nav", tag("ul", links), aria_label="Contents")
    parts = [section(part.title, part.content, anchor=part.anchor) for part in sections]
    written = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")
    bottom = tag(
        "footer", tag("p", f"Written by sfvi {versions()['sfvi']} on {written}. This file is complete by itself.")
    )
    body = tag("body", top, tag("main", contents, *parts), bottom)
    return join(Html("<!DOCTYPE html>\n"), tag("html", head, body, lang="en"), Html("\n"))


def write(path: str | os.PathLike, content: Html) -> None:
    """Write a report, whole or not at all."""
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"path is {path!r}; give the name of the HTML file to write.")
    path = Path(path)
    if path.is_dir():
        raise OptionError(f"{str(path)!r} is a folder; give the name of the HTML file to write.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(content, "utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
