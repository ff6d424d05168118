"""The server's report: what is shared and how it came about. It holds nothing local."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..diagnostics import Diagnosis
from ..provenance import versions
from . import checks, graph
from .disclosure import what_left
from .html import Html, bytes_, count, definitions, figure, join, listed, more, number, paragraph, table, tag
from .layout import MOST_PROGRAMS
from .marginals import global_marginals, marginals_table
from .page import Section, page
from .pictures import MOST_SILOS, bound_by_round, is_cut, participation

if TYPE_CHECKING:
    from ..results import Fit

FAMILIES = {
    "MeanFieldGaussian": "a mean-field Gaussian",
    "FullGaussian": "a Gaussian with full covariance",
    "LowRankGaussian": "a Gaussian with a low-rank covariance",
    "NormalizingFlow": "a normalizing flow",
}
MOST_THETA, MOST_VALUES = 30, 8


def server_report(fit: "Fit", diagnosis: Diagnosis | None) -> Html:
    """The report of a fit.

    Args:
        fit: The fit.
        diagnosis: What `fit.diagnose()` returned; None for none.
    """
    if diagnosis is not None:
        checks.check_given(diagnosis, silo=False)
    wording = fit.posterior.model.wording
    latents = [wording.name(site.name) for site in fit.posterior.model.population.layout.sites]
    shared = listed(latents, most=4) if latents else "the parameters θ"
    silos = fit.participation.columns
    lead = join(checks.verdict(diagnosis), _summary(fit))
    sections = [
        Section("model", "The model", _model(fit)),
        Section("posterior", "Posterior of what is shared", _posterior(fit)),
        Section("rounds", "The rounds", _rounds(fit)),
        Section("diagnostics", "Diagnostics", checks.details(diagnosis, wording.note)),
        Section("communication", "Rounds and bytes", _communication(fit)),
        Section("disclosure", "What left each silo", what_left(fit.provenance, diagnosis, wording.before)),
        Section("making", "How it was made", _making(fit)),
    ]
    title = wording.title or f"Posterior of {shared} from {count(len(silos), 'silo')}"
    return page(
        kind="Report of the server · structured federated variational inference",
        title=title,
        lead=lead,
        sections=sections,
    )


def _bound_name(fit):
    draws = fit.posterior.bound.num_draws
    return "ELBO" if draws == 1 else f"bound with {draws} draws"


def _summary(fit):
    names = [str(name) for name in fit.participation.columns]
    family = FAMILIES.get(type(fit.posterior.family).__name__, type(fit.posterior.family).__name__)
    size = fit.posterior.model.population.layout.size
    ways = " then ".join(
        f"{row.algorithm} ({count(int(row.rounds), 'round')})" for row in fit.communication.itertuples()
    )
    sentences = [
        f"A hierarchical model was fitted to the data of {count(len(names), 'silo')} ({listed(names)}) by {ways}.",
        "No silo sent its data. This report holds what is shared, and nothing of any unit or of a silo's own latents.",
    ]
    if size:
        which = "the one global latent" if size == 1 else f"the {size:,} global latents"
        sentences.insert(1, f"The posterior of {which} is {family} in unconstrained space.")
    else:
        sentences.insert(1, "There are no global latents; the parameters θ were learned.")
    return paragraph(" ".join(sentences), class_="lead")


def _model(fit):
    found = graph.in_words(fit.graph, fit.posterior.model.wording)
    programs = found.programs
    caption = [
        "Look for where a site lies: what is in the blue box is shared and known to the server; what is in the dashed "
        "box exists in each silo separately and stays there. Arrows lead from a site to those whose distribution is "
        "computed from it; shaded sites are observed, square ones are learned parameters θ."
    ]
    if any(node.plates for program in programs for node in program.nodes) or any(n.plates for n in found.population):
        caption.append("A frame is a plate: its sites repeat for every member. A plate drawn twice is one plate.")
    if len(programs) > MOST_PROGRAMS:
        caption.append(f"The first {MOST_PROGRAMS} of {len(programs)} silo programs are drawn; the table has all.")
    if not programs:
        caption.append(
            "The silo programs are not drawn: which sites they have is known only where a silo's data are, and none "
            "was here."
        )
    picture = figure(graph.drawing(found), " ".join(caption), wide=True)
    return join(picture, graph.sites_table(found))


def _posterior(fit):
    parts = []
    if fit.posterior.model.population.layout.sites:
        found = global_marginals(fit.posterior)
        omitted = sum(found.left_out.values())
        caption = (
            f"Marginals from {found.num_samples:,} draws of q(z_G), in the model's own space. Shaded is the interval "
            "that holds 95%, the dashed line is zero."
        )
        if omitted:
            caption += f" Of every site the first coordinates are shown; {omitted:,} are left out."
        parts.append(marginals_table(found, caption=caption))
    else:
        parts.append(paragraph("The model has no global latents."))
    leaves = jax.tree.flatten_with_path(fit.theta)[0]
    if leaves:
        parts.append(tag("h3", "Parameters θ"))
        parts.append(_theta(leaves))
    if fit.noise_error is not None:
        rows = [
            [tag("code", str(i)), *map(number, row)]
            for i, row in zip(fit.noise_error.index, fit.noise_error.to_numpy(), strict=True)
        ]
        caption = "How much the posterior owes to its fixed draws, from repeated maximizations."
        head = ["coordinate, unconstrained", *map(str, fit.noise_error.columns)]
        parts.append(table(head, rows[:MOST_THETA], caption=caption, numbers=range(1, len(head))))
    return join(*parts)


def _theta(leaves):
    rows = []
    for path, leaf in leaves[:MOST_THETA]:
        values = np.asarray(leaf, np.float64).ravel()
        shown = ", ".join(number(value) for value in values[:MOST_VALUES])
        if len(values) > MOST_VALUES:
            shown += f", … ({len(values) - MOST_VALUES:,} more, from {number(values.min())} to {number(values.max())})"
        name = ".".join(str(getattr(entry, "key", entry)) for entry in path)
        rows.append([tag("code", name), " × ".join(map(str, np.shape(leaf))) or "a number", shown])
    caption = "Learned as numbers, by maximizing the bound; in the model's own space."
    if len(leaves) > MOST_THETA:
        caption += f" {more(len(leaves) - MOST_THETA)}"
    return table(["parameter", "shape", "value"], rows, caption=caption)


def _rounds(fit):
    parts, elbo, what = [], np.asarray(fit.elbo, np.float64), _bound_name(fit)
    if not np.isfinite(elbo).any():
        parts.append(paragraph(f"The {what} is not known here: the silos kept their terms of it to themselves."))
    elif len(elbo) == 1:
        parts.append(paragraph(f"One round was done; the estimate of the {what} in it is {number(elbo[0])}."))
    else:
        caption = f"The estimate of the {what} in each round. It should rise and then stay level, up to noise."
        if is_cut(elbo):
            caption += " The first rounds lie far below and are cut off."
        if not np.isfinite(elbo).all():
            caption += " Gaps are rounds in which it is not known."
        parts.append(figure(bound_by_round(elbo, what=what), caption))
    parts.append(_participation(fit.participation))
    if fit.convergence is not None:
        parts.append(paragraph(f"The stopping rule: {fit.convergence.verdict}"))
    return join(*parts)


def _participation(present):
    silos, rounds = present.shape[1], len(present)
    if present.to_numpy().all():
        who = {1: "The one silo", 2: "Both silos"}.get(silos, f"All {silos:,} silos")
        return paragraph(f"{who} took part in {'the one round' if rounds == 1 else f'each of the {rounds:,} rounds'}.")
    caption = (
        "Who took part when, a line for each silo; the share of rounds is at the right. Look for silos that were "
        "absent for long, or at the end: the posterior then owes little to them."
    )
    if rounds > 300:
        caption += " A shade is the share of several rounds."
    if silos > MOST_SILOS:
        caption += f" The first {MOST_SILOS} of {silos:,} silos are shown."
    return figure(participation(present), caption)


def _communication(fit):
    frame, present = fit.communication, fit.participation.to_numpy()
    mean_present = present.sum() / max(1, len(present))
    rows, total = [], 0.0
    for row in frame.itertuples(index=False):
        name, rounds, there, back = row
        whole = rounds * mean_present * (there + back)
        total += whole
        rows.append([str(name), f"{int(rounds):,}", f"{int(there):,}", f"{int(back):,}", bytes_(whole)])
    head = ["algorithm", "rounds", "bytes to a silo", "bytes from a silo", "in all, all silos"]
    caption = (
        "Rounds, and the messages between the server and one silo in a round; their size is the same in every round."
    )
    seconds = "" if fit.seconds is None else f" The rounds took {number(fit.seconds)} seconds, compilation left out."
    said = paragraph(
        f"In all {bytes_(total)} were exchanged, with {mean_present:,.3g} silos a round on average.{seconds}"
    )
    return join(table(head, rows, caption=caption, numbers=[1, 2, 3, 4]), said)


def _making(fit):
    known = fit.provenance
    now = versions()
    if known is None:
        said = paragraph(
            "This file was written before fits recorded their options, key and versions, so they are not known."
        )
        return join(said, tag("h3", "Versions that wrote this report"), definitions(now.items()))
    run = {"engine": known.engine, "algorithm": known.algorithm, **known.settings}
    run |= {"key": known.key, "precision": known.precision}
    given = [(name, tag("code", known.options[name])) for name in known.given]
    rest = [(name, tag("code", text)) for name, text in known.options.items() if name not in known.given]
    parts: list[Any] = [definitions((name, tag("code", value)) for name, value in run.items())]
    parts.append(tag("h3", "Options that were given"))
    parts.append(definitions(given) if given else paragraph("None: all options of the algorithm are the default."))
    parts.append(tag("details", tag("summary", "Options left at their default"), definitions(rest)))
    parts += [tag("h3", "Versions"), definitions((n, tag("code", v)) for n, v in known.versions.items())]
    if now != known.versions:
        changed = [f"{name} {version}" for name, version in now.items() if known.versions.get(name) != version]
        parts.append(paragraph(f"This report was written with other versions: {', '.join(changed)}.", class_="note"))
    return join(*parts)
