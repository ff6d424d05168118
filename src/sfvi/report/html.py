"""HTML made of functions: whatever is not marked as HTML is escaped."""

import re
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
import pandas as pd

VOID = ("br", "hr", "meta")
NOTHING = "–"
SHORT, LONG = 14, 40  # characters of a cell
TAG = re.compile(r"<[^>]*>")
SYMBOL = re.compile(r"\b(z)_(G)\b")


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str | Iterable[str], **attributes: str | float | None) -> Html:
    """An element; strings inside are escaped unless they are `Html`.

    Args:
        name: Of the element.
        *children: What it holds.
        **attributes: `class_` stands for `class`, `aria_label` for `aria-label`; those that are None are left out.
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opening = "".join(f' {key}="{_safe(str(value))}"' for key, value in given.items())
    inside = join(*children)
    return Html(f"<{name}{opening}>" if name in VOID else f"<{name}{opening}>{inside}</{name}>")


def join(*children: str | Iterable[str]) -> Html:
    """Elements one after the other."""
    parts = []
    for child in children:
        if isinstance(child, Html):
            parts.append(str(child))
        elif isinstance(child, str):
            parts.append(_safe(child))
        else:
            parts.append(str(join(*child)))
    return Html("".join(parts))


def _safe(text):
    """Escaped, and without what no file in UTF-8 can hold or no browser shows."""
    printable = "".join(c if c in "\n\t" or ord(c) >= 32 else "\ufffd" for c in text)
    return escape(printable.encode("utf-8", "replace").decode())


def math(text: str) -> Html:
    """Text in which the symbols of the method are set as such; what is HTML already stays."""
    if isinstance(text, Html):
        return text
    return Html(SYMBOL.sub(lambda m: f"<i>{m[1]}</i><sub>{m[2]}</sub>", _safe(text)))


def paragraph(*children: str, class_: str | None = None) -> Html:
    """A paragraph."""
    return tag("p", map(math, children), class_=class_)


def bullets(lines: Iterable[str]) -> Html:
    """A list."""
    return tag("ul", [tag("li", math(line)) for line in lines])


def section(title: str, *children: str | Iterable[str], anchor: str) -> Html:
    """A section with its heading, to which the contents lead."""
    heading = tag("h2", title, id=f"{anchor}-title")
    return tag("section", heading, *children, id=anchor, aria_labelledby=f"{anchor}-title")


def figure(picture: Html, caption: str | Html, *, wide: bool = False) -> Html:
    """A picture and the sentence that says what to look for; on narrow screens wide ones scroll by themselves."""
    scrolls = {"class_": "scroll", "tabindex": 0, "role": "region", "aria_label": "Figure"} if wide else {}
    frame = tag("div", picture, **scrolls)
    return tag("figure", frame, tag("figcaption", math(caption)))


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str | Html,
    numbers: Sequence[int] = (),
    stacks: bool = False,
) -> Html:
    """A table whose first column names the rows; rows and columns that say nothing but "–" are left out.

    Args:
        head: Titles of the columns.
        rows: Cells.
        caption: What it shows.
        numbers: Columns of numbers, which are set flush right.
        stacks: Whether on a narrow screen a row's cells stand below each other; otherwise the table scrolls by itself.
    """
    head, rows, numbers = _said(list(head), [list(row) for row in rows], numbers)

    def cell(position, content):
        if position == 0:
            return tag("th", math(content), scope="row")
        return tag("td", math(content), class_="number" if position in numbers else _breadth(content))

    header = [tag("th", t, scope="col", class_="number" if i in numbers else None) for i, t in enumerate(head)]
    body = [tag("tr", [cell(i, c) for i, c in enumerate(row)]) for row in rows]
    parts = [tag("caption", math(caption)), tag("thead", tag("tr", header)), tag("tbody", body)]
    made = tag("table", parts, class_="stacks" if stacks else None)
    return tag("div", made, class_="scroll", tabindex=0, role="region", aria_label="Table")


def _breadth(content):
    """The class of a cell of text: a few words stay on one line, many get room for some on each."""
    length = len(TAG.sub("", content) if isinstance(content, Html) else content)
    return "short" if length <= SHORT else "long" if length > LONG else None


def _said(head, rows, numbers):
    """A table without the rows and columns that are empty; the first column names the others."""
    rows = [row for row in rows if len(row) == 1 or set(map(str, row[1:])) != {NOTHING}] or rows
    kept = [i for i in range(len(head)) if i == 0 or not rows or {str(row[i]) for row in rows} != {NOTHING}]
    if kept == [0]:
        return head, rows, numbers
    places = [place for place, i in enumerate(kept) if i in numbers]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows], places


def definitions(pairs: Iterable[tuple[str, str]]) -> Html:
    """Names and what they stand for."""
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs])


def listed(names: Sequence[str], *, most: int = 8) -> str:
    """Names in a sentence, the first ones if they are many."""
    shown = [str(name) for name in names[:most]]
    if len(names) > most:
        shown.append(f"{len(names) - most:,} more")
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def count(number: int, what: str, plural: str | None = None) -> str:
    """A number and what it counts."""
    return f"{number:,} {what if number == 1 else plural or what + 's'}"


def more(number: int) -> str:
    """How many are not shown."""
    return f"{number:,} more {'is' if number == 1 else 'are'} left out."


def number(value: float, scale: float | None = None, *, digits: int = 3) -> str:
    """A number with so many digits of `scale`, by default of itself; with a true minus sign."""
    value = float(value)
    if not np.isfinite(value):
        return NOTHING
    size = abs(value) if scale is None else abs(float(scale))
    if size == 0 or not np.isfinite(size):
        size = abs(value) or 1.0
    if max(size, abs(value)) >= 1e7 or max(size, abs(value)) < 1e-4 or size < 1e-8 * abs(value):
        text = "0" if value == 0 else f"{value:.{digits}g}"
    else:
        places = min(10, max(0, digits - 1 - int(np.floor(np.log10(size)))))
        text = f"{value:,.{places}f}"
    return text.replace("-", "−")


def columns(frame: pd.DataFrame) -> list[list[str]]:
    """The cells of a table of numbers, those of a column with the same number of places."""
    values = frame.to_numpy(float)
    scales = [np.max(np.abs(v[np.isfinite(v)]), initial=0.0) for v in values.T]
    return [[number(v, scale) for v, scale in zip(row, scales, strict=True)] for row in values]


def bytes_(number: float) -> str:
    """A number of bytes in a unit that suits it."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.3g} {unit}"
        number /= 1000
    raise AssertionError
