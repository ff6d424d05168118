"""What left each silo: the fields of its replies, in words."""

from collections.abc import Sequence
from math import isinf, prod
from typing import TYPE_CHECKING

import numpy as np

from ..provenance import Part, Provenance, Sent
from .html import Html, bullets, bytes_, count, join, paragraph, table, tag

if TYPE_CHECKING:
    from ..diagnostics import Diagnosis

# By algorithm and first field of its Reply; {} is one of PARAMETERS.
REPLIES = {
    ("SFVI", "gradient"): "derivative of the silo's term of the bound with respect to {}",
    ("SFVIAvg", "shared"): "the silo's own copy, after its steps, of {}",
    ("FixedNoise", "value"): "the silo's term of the bound, at its maximum over the silo's own parameters",
    ("FixedNoise", "gradient"): "derivative of that maximum with respect to {}",
    ("ImportanceSFVI", "values"): "the silo's term of the bound at each importance sample",
    ("ImportanceSFVI", "gradients"): "its derivatives with respect to {}, one for each importance sample",
    ("Sites", "change"): "change of {}",
}
PARAMETERS = {
    ("family", "loc"): "the means of q(z_G)",
    ("family", "log_scale"): "the log standard deviations of q(z_G)",
    ("family", "lower"): "the correlations of q(z_G), as a triangle",
    ("family", "factor"): "the low-rank part of the covariance of q(z_G)",
    ("family",): "the weights of the flow q(z_G)",
    ("network",): "the weights φ of the inference network",
    ("latents", "precision"): "the precision of the silo's Gaussian factor of q(z_G); of a matrix one half",
    ("latents", "shift"): "the precision times the mean of that factor",
    ("points", "precision"): "the curvature by which the silo holds θ and φ",
    ("points", "shift"): "the pull of the silo on θ and φ",
}


def meaning(algorithm: str, path: Sequence[str]) -> str | None:
    """What a part of a reply is, in words; None if nobody has said."""
    words = REPLIES.get((algorithm, path[0]))
    if words is None or "{}" not in words:
        return words
    rest = tuple(path[1:])
    if rest[:1] == ("theta",):
        return words.format(f"the parameter {rest[1]!r} of θ, unconstrained")
    found = PARAMETERS.get(rest[:2]) or PARAMETERS.get(rest[:1])
    return None if found is None else words.format(found)


def in_words(sent: Sent) -> Html:
    """A reply as a table."""
    grouped: dict[str, list[Part]] = {}
    for part in sent.parts:
        words = meaning(sent.algorithm, part.path) or "see the sources of the algorithm"
        grouped.setdefault(words, []).append(part)
    rows = []
    for words, parts in grouped.items():
        numbers = sum(prod(part.shape) for part in parts)
        if numbers == 0:
            continue
        fields = ".".join(parts[0].path) if len(parts) == 1 else f"{'.'.join(parts[0].path[:2])} ({len(parts)} arrays)"
        shape = " × ".join(map(str, parts[0].shape)) or "a number"
        rows.append([tag("code", fields), words, shape if len(parts) == 1 else "several", f"{numbers:,}"])
    size = sum(prod(part.shape) * np.dtype(part.dtype).itemsize for part in sent.parts)
    total = sum(prod(part.shape) for part in sent.parts)
    caption = (
        f"{sent.algorithm}: everything in one reply of a silo, {count(total, 'number')} ({bytes_(size)} in memory)."
    )
    return table(["field", "what it is", "shape", "numbers"], rows, caption=caption, numbers=[3])


def what_left(provenance: Provenance | None, diagnosis: "Diagnosis | None", before: Sequence[str] = ()) -> Html:
    """The section of the report: what leaves, when, and what stays.

    Args:
        provenance: How the fit came about; None if that is not known.
        diagnosis: The diagnosis of the report; None for none.
        before: What silos told before the first round, beyond the number of their units.
    """
    parts = [
        paragraph(
            "A silo's reply in a round has the fields below and nothing else; its size does not depend on the silo's "
            "data. The data themselves, the posteriors of local latents, unit ids and labels stay in the silo."
        )
    ]
    if provenance is None or not provenance.sent:
        parts.append(
            paragraph("This file does not say which algorithm ran with which options, so the fields are not listed.")
        )
    else:
        parts += [in_words(sent) for sent in provenance.sent]
    parts.append(bullets([*before, *_occasions(provenance, diagnosis)]))
    parts.append(paragraph(_noise(provenance), class_="note"))
    return join(*parts)


def _noise(provenance):
    """What is promised about these numbers, or that nothing is."""
    if provenance is None or provenance.privacy is None or isinf(provenance.privacy.epsilon):
        return (
            "No noise is added to any of these numbers. They are computed from the silo's data and can tell of them: a "
            "gradient from a silo with few units may say much about each."
        )
    said = str(provenance.privacy)
    if provenance.engine != "deployed":
        said += (
            " In this process the noise follows from the run's key, and the ELBO above and any diagnosis have none: "
            "what is promised holds for the replies of a deployed run."
        )
    return said


def _occasions(provenance, diagnosis):
    """What is sent on other occasions than in a round."""
    lines = ["Before the first round: how many units the silo has, one number."]
    if provenance is not None and provenance.engine == "deployed":
        lines[0] = (
            "Before the first round: how many units the silo has, whether units have latents of their own and depend "
            "on each other, and the initial values of the parameters in its program. After the last: θ in the model's "
            "own space, which is the same in all silos."
        )
        told = provenance.settings.get("disclose_elbo") == "True"
        lines.append(
            "With every reply, the silo's estimate of its term of the bound: this run asked for it (disclose_elbo)."
            if told
            else "The silo's term of the bound stayed there: it leaves only if a run asks for it (disclose_elbo)."
        )
        if provenance.settings.get("secure_sum") == "True":
            lines.append("Replies were masked (secure_sum): the server saw the sum of all silos' only.")
    elif provenance is not None:
        lines.append(
            "This run was computed in one process, where all silos' data are. There their terms of the bound were "
            "added up for the picture above; deployed, they leave a silo only if a run asks for it (disclose_elbo)."
        )
    if provenance is not None and "unit_ids" in provenance.settings:
        lines.append("Units had ids that hold in every silo, so who knows the key knows the noise of local latents.")
    done = [] if diagnosis is None else [check.name for check in diagnosis.checks]
    if "importance" in done:
        lines.append(
            "For the check “importance”: the log marginal likelihood of the silo's data at each draw of the global "
            "latents, and its Monte Carlo error."
        )
    if "optimum" in done:
        lines.append("For the check “optimum”: gradients of the silo's term at draws of the global latents.")
    if any(name.startswith("predictive, ") for name in done):
        lines.append("The verdict of the posterior predictive check, by the silos that agreed to it.")
    return lines
