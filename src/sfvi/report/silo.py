"""A silo's own report: its latents, its data, its checks. It stays in the silo."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..diagnostics import Diagnosis
from . import checks
from .html import Html, count, definitions, figure, join, listed, more, number, paragraph, table, tag
from .marginals import FEW, Marginals, marginals_table, silo_marginals
from .page import Section, page
from .pictures import forest

if TYPE_CHECKING:
    from ..posterior import SiloPosterior

MOST_PLOTS, MOST_LEAVES = 8, 40


def silo_report(silo: "SiloPosterior", diagnosis: Diagnosis | None, global_diagnosis: Diagnosis | None = None) -> Html:
    """The report of a silo's posterior.

    Args:
        silo: The silo's posterior.
        diagnosis: What `silo.diagnose()` returned; None for none.
        global_diagnosis: What `fit.diagnose()` returned at the server; None if it is not here.
    """
    if diagnosis is not None:
        checks.check_given(diagnosis, silo=True)
    if global_diagnosis is not None:
        checks.check_given(global_diagnosis, silo=False)
    stays = tag(
        "div",
        paragraph(tag("strong", "Stays in this silo. ")),
        paragraph(
            "This report holds the posteriors of single units and summaries of the silo's data. Hand it to nobody "
            "who may not see these data; what may leave is in the report of the server."
        ),
        class_="stays",
        role="note",
    )
    shared = checks.verdict(global_diagnosis, of="The global posterior") if global_diagnosis else Html("")
    lead = join(stays, checks.verdict(diagnosis, of="This silo"), shared, _summary(silo))
    note = silo.shared.model.wording.note
    sections = [
        Section("posterior", "Posterior of this silo's latents", _posterior(silo)),
        Section(
            "diagnostics", "Diagnostics", join(checks.details(diagnosis, note), _of_globals(global_diagnosis, note))
        ),
        Section("data", "This silo's data", _data(silo)),
    ]
    kind = "Report of a silo · stays in this silo"
    return page(kind=kind, title=f"Silo {silo.name}", lead=lead, sections=sections)


def _of_globals(found, note):
    """What is known here of the global posterior, on which all of the silo's own depends."""
    heading = tag("h3", "The global posterior")
    if found is None:
        return join(
            heading,
            paragraph(
                "The silo's posterior is no better than the global one, whose diagnosis was not given for this report; "
                "it is in the report of the server."
            ),
        )
    return join(heading, checks.details(found, note))


def _summary(silo):
    layout, name_of = silo.data.program.layout, silo.shared.model.wording.name
    groups = [f"{count(group.plate.size, 'unit')} of plate {group.plate.name}" for group in layout.groups]
    if layout.own.sites:
        groups.append(f"the silo itself ({listed([name_of(site.name) for site in layout.own.sites])})")
    has = f"latents of {listed(groups)}" if groups else "no latents of its own"
    program = "" if silo.program is None else f" It uses the program of silo {silo.program}."
    return paragraph(f"This silo has {has}.{program}", class_="lead")


def _posterior(silo):
    found = silo_marginals(silo)
    if not found.shown:
        return paragraph("The program of this silo has no latents of its own: all that was learned is shared.")
    sizes = {name: len(shown) + found.left_out[name] for name, shown in found.shown.items()}
    small = {name: shown for name, shown in found.shown.items() if sizes[name] <= FEW}
    parts = []
    if small:
        caption = (
            f"Sites with few coordinates, from {found.num_samples:,} draws. Shaded is the interval that holds 95%."
        )
        parts.append(marginals_table(Marginals(small, dict.fromkeys(small, 0), found.num_samples), caption=caption))
    large = [name for name in found.shown if name not in small]
    name_of = silo.shared.model.wording.name
    latents = {name_of(site.name) for group in silo.data.program.layout.groups for site in group.sites}
    large.sort(
        key=lambda name: name.partition("[…")[0] not in latents
    )  # what was learned comes before what is computed from it
    for position, name in enumerate(large[:MOST_PLOTS]):
        parts.append(_forest(name, found, sizes[name], f"forest-{position}"))
    if large[MOST_PLOTS:]:
        parts.append(paragraph(f"Not drawn: {listed(large[MOST_PLOTS:])}; silo.summary() has them."))
    return join(*parts)


def _forest(name, found, size, anchor):
    rows = [
        [one.draws.mean(), *np.quantile(one.draws, [0.025, 0.975]), one.draws.std(ddof=1)] for one in found.shown[name]
    ]
    full = [one.label for one in found.shown[name]]
    frame = pd.DataFrame(rows, [one.short for one in found.shown[name]], ["mean", "low", "high", "sd"])
    caption = f"{name}: means and 95% intervals, sorted by mean. Look for those that lie apart from the others."
    left_out = found.left_out[name]
    if left_out:
        half = len(frame) // 2
        caption += f" Of {size:,} the {half} lowest and the {half} highest; the {left_out:,} between them are left out."
    scale, shown = float(frame["sd"].to_numpy().min()), frame[["mean", "sd", "low", "high"]].to_numpy()
    cells = [
        [tag("code", label), *(number(value, scale, digits=2) for value in row)]
        for label, row in zip(full, shown, strict=True)
    ]
    head = ["coordinate", "mean", "sd", "2.5%", "97.5%"]
    numbers = table(head, cells, caption=f"The numbers of the picture: {name}.", numbers=range(1, 5))
    picture = figure(forest(frame, name=anchor, what=name, left_out=left_out), caption)
    return join(tag("h3", name), picture, tag("details", tag("summary", "As a table"), numbers))


def _data(silo):
    wording = silo.shared.model.wording
    values = [(wording.name(name), leaf) for name, leaf in silo.data.values.items() if name not in wording.hidden]
    rows = []
    for label, leaf in values[:MOST_LEAVES]:
        array = np.asarray(leaf)
        numeric = array.astype(np.float64).ravel() if array.dtype.kind in "biuf" and array.size else np.zeros(0)
        of = [numeric.mean(), numeric.std(), numeric.min(), numeric.max()] if numeric.size else [np.nan] * 4
        shape = " × ".join(f"{n:,}" for n in array.shape) or "a number"
        zeros = f"{100 * np.mean(numeric == 0):.0f}%" if numeric.size else "–"
        rows.append([tag("code", label), shape, str(array.dtype), *map(number, of), zeros])
    caption = "Arrays of the silo's data."
    if len(values) > MOST_LEAVES:
        caption += f" {more(len(values) - MOST_LEAVES)}"
    head = ["array", "shape", "type", "mean", "sd", "smallest", "largest", "zeros"]
    plates = [(plate.name, count(plate.size, "member")) for plate in silo.data.program.layout.plates]
    sizes = join(tag("h3", "Plates"), definitions(plates)) if plates else Html("")
    told = paragraph(wording.note, class_="note") if wording.note else Html("")
    return join(table(head, rows, caption=caption, numbers=range(3, 8)), told, sizes)
