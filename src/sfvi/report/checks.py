"""A diagnosis in a report: the verdict on top, each check with its figures below."""

import dataclasses
from typing import Any

import numpy as np
import pandas as pd

from ..diagnostics import Check, Diagnosis, ImportanceCheck, OptimumCheck, PredictiveCheck, RoundsCheck, UnitsCheck
from ..diagnostics.units import OFF
from ..errors import OptionError
from .html import Html, bullets, columns, count, definitions, join, number, paragraph, table, tag

TONES = {"fine": "fine", "doubtful": "doubtful", "do not trust": "bad"}
HEADLINES = {
    "fine": "No check found a reason to distrust this posterior.",
    "doubtful": "Read what the checks say before this posterior is used.",
    "do not trust": "This posterior is not to be used as it is.",
}
QUESTIONS = {
    RoundsCheck: "Had the rounds come to rest? The last third of them is compared with the third before.",
    OptimumCheck: "Is the bound at its maximum? Its gradient says how far away that is, in posterior sds.",
    ImportanceCheck: (
        "Does q(z_G) agree with the posterior? Its draws are weighted by the model itself, the silos' own latents "
        "integrated out; k-hat tells how heavy the tail of the weights is."
    ),
    UnitsCheck: "Does each unit's q agree with its posterior? One k-hat for each, by importance sampling.",
    PredictiveCheck: "Could the model have made these data? Statistics of the data beside those of replicated ones.",
}
FIGURES = {
    "gain": "gain of the bound, nats",
    "gain_se": "its standard error",
    "drift": "largest move of a mean, in sds",
    "scale_drift": "largest move of a log sd",
    "effective_rounds": "effective rounds of the last third",
    "gradient_noise": "noise of one round's gradient, in sds",
    "k_hat": "k-hat",
    "threshold": "good if at most",
    "effective_draws": "effective draws",
    "noise": "uncertainty of a log weight",
    "rounds": "rounds",
}
MOST = 12


def check_given(diagnosis: Any, *, silo: bool) -> None:
    """Refuse what is no diagnosis, and at the server what belongs to a silo."""
    what = "fit.silo(name).diagnose()" if silo else "fit.diagnose()"
    if not isinstance(diagnosis, Diagnosis):
        raise OptionError(f"diagnosis is {diagnosis!r}; give what {what} returned, None to have it made, or False.")
    if silo:
        return
    for check in diagnosis.checks:
        if isinstance(check, UnitsCheck) or (isinstance(check, PredictiveCheck) and check.name == "predictive"):
            raise OptionError(
                f"diagnosis holds the check {check.name!r} of a silo, which stays there; give what fit.diagnose() "
                "returned."
            )


def verdict(diagnosis: Diagnosis | None, *, of: str = "") -> Html:
    """The verdict of all checks together, for the top of a page; `of` says what they are of, where there are two."""
    begin = f"{of}: " if of else ""
    if diagnosis is None:
        said = paragraph(
            "No diagnosis was made for this report, so it says nothing of how far the posterior can be trusted."
        )
        return tag(
            "div",
            tag("strong", begin + ("not diagnosed" if of else "Not diagnosed")),
            said,
            class_="verdict unknown",
            role="note",
        )
    trust = diagnosis.trust
    worst = [check for check in diagnosis.checks if check.trust == trust]
    lines = [paragraph(HEADLINES[trust])]
    if trust != "fine":
        lines += [paragraph(tag("em", f"{check.name}: "), _reason(check)) for check in worst]
    lines += [paragraph(_capital(note), class_="note") for note in diagnosis.notes]
    title = (begin + trust if of else _capital(trust)) + (
        ", as far as it was checked" if diagnosis.notes and trust == "fine" else ""
    )
    return tag("div", tag("strong", title), *lines, class_=f"verdict {TONES[trust]}", role="note")


def details(diagnosis: Diagnosis | None, note: str = "") -> Html:
    """Every check: the question, the verdict and its figures; `note` is about the units of the figures."""
    if diagnosis is None:
        return paragraph("None was made: the caller left it out.")
    rows = [[check.name, _trust(check.trust), _reason(check)] for check in diagnosis.checks]
    caption = "All checks and their verdicts; the worst one counts."
    parts = [table(["check", "trust", "why"], rows, caption=caption, stacks=True)]
    parts += [paragraph(note, class_="note")] if note else []
    for check in diagnosis.checks:
        parts += [tag("h3", _capital(check.name)), paragraph(_question(check)), _figures(check)]
    if diagnosis.notes:
        parts += [tag("h3", "Not checked"), bullets(diagnosis.notes)]
    return join(*parts)


def _question(check):
    return next((words for kind, words in QUESTIONS.items() if isinstance(check, kind)), "")


def _figures(check: Check) -> Html:
    """Single numbers of a check, and the worst lines of its tables."""
    fields = {}
    for field in dataclasses.fields(check) if dataclasses.is_dataclass(check) else ():
        value = getattr(check, field.name)
        if field.name in FIGURES and isinstance(value, int | float) and np.isfinite(value):
            whole = isinstance(value, int) or field.name == "effective_draws"
            fields[FIGURES[field.name]] = f"{value:,.0f}" if whole else number(value)
    parts = [definitions(fields.items())] if fields else []
    if isinstance(check, OptimumCheck):
        parts.append(_worst(check.steps, np.abs(check.steps["mean"].to_numpy()), "The way to the maximum of the bound"))
    elif isinstance(check, ImportanceCheck) and check.shifts is not None:
        order = np.abs(check.shifts.to_numpy()).max(axis=1)
        parts.append(_worst(check.shifts, order, "What the weights would change"))
    elif isinstance(check, UnitsCheck):
        parts.append(_units(check))
    elif isinstance(check, PredictiveCheck) and check.name == "predictive":  # of a silo, which may see its own data
        parts.append(_predictive(check.table))
    return join(*parts)


def _worst(frame: pd.DataFrame, order: np.ndarray, what: str) -> Html:
    chosen = frame.iloc[np.argsort(-order, kind="stable")[:MOST]]
    rows = [[tag("code", str(label)), *cells] for label, cells in zip(chosen.index, columns(chosen), strict=True)]
    more = f", the {MOST} largest of {count(len(frame), 'coordinate')}" if len(frame) > MOST else ""
    head = ["coordinate, unconstrained", *map(str, frame.columns)]
    return table(head, rows, caption=f"{what}{more}.", numbers=range(1, len(head)))


def _units(check: UnitsCheck) -> Html:
    """The units that are furthest off, by the size of what their table says of them."""
    named = [column for column in check.table.columns if column in ("plate", "unit")]
    figures = check.table.drop(columns=named).rename(columns={"k_hat": "k-hat"})
    limits = pd.Series({column: 1.0 if column == "k-hat" else OFF for column in figures})
    order = (figures.assign(**{"k-hat": figures["k-hat"].clip(lower=0)}).abs() / limits).max(axis=1).to_numpy()
    first = np.argsort(-np.nan_to_num(order, nan=np.inf), kind="stable")[:MOST]
    names = check.table[named].iloc[first].astype(str).to_numpy()
    rows = [[*name, *cells] for name, cells in zip(names, columns(figures.iloc[first]), strict=True)]
    more = f", the {MOST} of {count(len(figures), 'unit')} that are furthest off" if len(figures) > MOST else ""
    head = [*named, *map(str, figures.columns)]
    return table(head, rows, caption=f"The units looked at{more}.", numbers=range(len(named), len(head)))


def _predictive(frame: pd.DataFrame) -> Html:
    rows = []
    for (site, statistic), (data, mean, sd, p) in zip(frame.index, frame.to_numpy(float), strict=True):
        cells = [number(value, sd) for value in (data, mean, sd)]
        rows.append([tag("code", str(site)), str(statistic), *cells, number(p, 1.0)])
    head = ["site", "statistic", *map(str, frame.columns)]
    caption = (
        "Statistics of the data and of replicated data; p near 0 or 1 means that the model does not make such data."
    )
    return table(head, rows, caption=caption, numbers=range(2, len(head)))


def _reason(check):
    """The verdict without the level that stands beside it."""
    words, level = check.verdict, f"{_capital(check.trust)}: "
    words = words.removeprefix(level)
    return _capital(words) if words[1:2].isalpha() else words


def _trust(level):
    return tag("span", level, class_=f"trust {TONES[level]}")


def _capital(text):
    return text[:1].upper() + text[1:]
