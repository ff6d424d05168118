"""What a formula's sites and arrays are called in reports: as in the formula, each once."""

from ..model.wording import Wording
from .design import Design
from .parsing import SILO
from .priors import Priors, sd_name

SCALED = "{} scaled"


def wording(design: Design, priors: Priors) -> Wording:
    """The words of a design.

    Args:
        design: How rows become arrays.
        priors: By name.
    """
    agreed, outcome = design.agreement, outcome_name(design)
    names = {"beta": "coefficients", SCALED.format("beta"): "coefficients", "y": outcome}
    distributions = {SCALED.format("beta"): _kinds(priors.coefficients.values())}
    hidden, labelled = {SCALED.format("beta")} if design.columns else set(), {"beta", SCALED.format("beta")}
    if design.outcome.extra:
        _inner(design.outcome.extra, priors.extra[design.outcome.extra], names, distributions, hidden)
    for block in design.blocks:
        for effect in block.effects:
            name = sd_name(effect, block.name)
            _inner(name, priors.sds[name], names, distributions, hidden)
        _inner(f"b({block.name})", None, names, distributions, hidden)
        names[f"root({block.name})"] = f"correlations({block.name})"
        hidden.add(f"root({block.name})")
    return Wording(
        title=f"{agreed.formula}, {agreed.family} family",
        names=names | _arrays(design, outcome),
        labelled=frozenset(labelled),
        hidden=frozenset(
            hidden | {f"data['group {b.name}']['{part}']" for b in design.blocks for part in ("ones", "row")}
        ),
        distributions=distributions,
        before=(_told(design, outcome),),
        note=_note(design),
    )


def outcome_name(design: Design) -> str:
    """The left side of the formula, as written."""
    return design.agreement.formula.split("~")[0].strip()


def _inner(name, prior, names, distributions, hidden):
    """A site that is sampled in other units than it is reported in."""
    names[SCALED.format(name)] = name
    hidden.add(SCALED.format(name))
    if prior is not None:
        distributions[SCALED.format(name)] = type(prior).__name__


def _kinds(priors):
    return ", ".join(dict.fromkeys(type(prior).__name__ for prior in priors))


def _arrays(design, outcome):
    """Arrays of a silo's data."""
    names = {"data['y']": outcome, "data['x']": "predictors", "data['offset']": "offset", "data['trials']": "trials"}
    for block in design.blocks:
        whose = "the silo" if block.name == SILO else block.name
        names[f"data['group {block.name}']['z']"] = f"predictors with effects of {whose}"
    return names


def _told(design, outcome):
    """What a `Summary` holds."""
    agreed = design.agreement
    parts = [
        "the formula and the family",
        "the number of rows used and of rows left out",
        "whether each column is numeric or categorical",
    ]
    if agreed.moments:
        parts.append(f"count, mean and sum of squared deviations of {_and(list(agreed.moments))}")
    for column in agreed.levels:
        all_ = ", all its levels in order" if column in agreed.orders else ""
        parts.append(f"which levels of {column} occur there{all_}")
    if agreed.outcome is not None:
        parts.append(f"count, mean and sum of squared deviations of the outcome {outcome}")
    if outcome.endswith("]"):
        parts.append("whether the chosen level of the outcome occurs there")
    return f"To agree on the formula, once, before the fit (a Summary): {'; '.join(parts)}."


def _note(design):
    if not design.agreement.standardize:
        return ""
    what = ["numeric predictors", *(["the outcome"] if design.outcome.name == "gaussian" else [])]
    return (
        f"Inside, {_and(what)} are centred and scaled by the means and sds of all silos. Checks are of coordinates in "
        "those units, unconstrained; posteriors are in the units of the data."
    )


def _and(names):
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
