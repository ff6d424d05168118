"""What a silo's runs have cost of its privacy, from its own record."""

import math
from pathlib import Path
from typing import Any

from .. import archive
from ..accountant import spent
from ..errors import ArchiveError, RefusalError
from ..privacy import Audit, Policy
from . import plan
from .silo import AUDIT, RUN_KIND, SECRET, record_of
from .spec import RunSpec, choose


def of_silo(folder: Path, policy: Policy) -> dict[str, Any]:
    r"""What all runs have cost, and each of those with differential privacy; nothing where no silo has its record.

    Args:
        folder: Of its runs.
        policy: Of the silo; in it the budget, and the $\delta$ at which all runs are counted.
    """
    if not (folder / AUDIT).exists() and not (folder / SECRET).exists():
        return {}
    try:
        audit = record_of(folder)
    except RefusalError as error:
        return {"record": str(error), "budget": None, "runs": {}}
    found = {path.parent.name: _of_run(path, audit, policy) for path in sorted(folder.glob("*/run.npz"))}
    runs = {name: about for name, about in found.items() if about is not None}
    total = None
    if runs or policy.epsilon is not None:
        total = _balance(policy.epsilon, _spent(audit.releases(), policy.delta)) | {"delta": policy.delta}
    return {"record": "whole", "budget": total, "runs": runs}


def line(budget: dict[str, Any]) -> str:
    """What was spent, for a person."""
    used = budget["spent"]
    if used is None:
        return "replies left without noise: no differential privacy"
    if budget["epsilon"] is None:
        text = f"epsilon {used:.3g} spent"
    else:
        text = f"epsilon {used:.3g} of {budget['epsilon']:.3g} spent, {budget['left']:.3g} left"
    counts = f", {budget['replies']:,} of {budget['rounds'] or '?'} replies" if "replies" in budget else ""
    return f"{text} (delta {budget['delta']:g}{counts})"


def _of_run(path, audit: Audit, policy):
    """Of one run: what it may cost follows from its options, if they are not in the model's own code."""
    try:
        spec = RunSpec.from_json(archive.read(path, kind=RUN_KIND)[1]["spec"])
    except ArchiveError:
        return None
    releases = audit.releases(run=spec.name)
    rounds, delta, allowed = None, policy.delta, None
    if ":" not in spec.algorithm:
        options: Any = choose(spec.algorithm, spec.options)
        if options.privacy is None:
            return None
        rounds, delta = plan.num_rounds(spec, options), options.privacy.delta
        allowed = _spent([options.privacy.planned(rounds).releases_of_units(rounds)], delta)
    elif not any(each.noise_multiplier > 0 for each in releases):
        return None
    counts = {"delta": delta, "replies": audit.given(spec.name), "rounds": rounds}
    return _balance(allowed, _spent(releases, delta)) | counts


def _spent(releases, delta):
    """None if there was no noise."""
    found = spent(releases, delta)
    return None if math.isinf(found) else found


def _balance(epsilon, used):
    left = None if epsilon is None or used is None else max(0.0, epsilon - used)
    return {"epsilon": epsilon, "spent": used, "left": left}
