"""What the operator of a run is told of its differential privacy: before it begins, and of its result."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from .. import archive, stages
from .._random import as_key
from ..algorithms import Spent
from ..families import full
from ..provenance import Provenance
from ..results import FIT_KIND
from ..run_checks import remarks_on_privacy
from . import plan
from .spec import RunSpec, choose


def before(spec: RunSpec) -> list[str]:
    """What the server would say before the first round, as far as it is known without the model.

    Options that are code are in the model's package, which an operator need not have, and without `sfvi[privacy]` costs
    cannot be counted: nothing is said then. Families cannot be chosen by plain values, so $q(z_G)$ is a Gaussian.
    """
    if ":" in spec.algorithm or importlib.util.find_spec("dp_accounting") is None:
        return []
    options: Any = choose(spec.algorithm, spec.options)
    if options.privacy is None:
        return []
    family = full()(jnp.zeros(2), 1.0) if spec.min_silos is None else None
    rounds, said = plan.num_rounds(spec, options), []
    for part in stages.schedule(options, as_key(spec.key), rounds, ends=not spec.until_converged):
        said += remarks_on_privacy(part.options, family, num_silos=len(spec.silos), num_rounds=part.num_rounds)
    return list(dict.fromkeys(said))


def after(result: Path) -> Spent | None:
    """What a run has cost, from the folder of its result; None without differential privacy."""
    found = Provenance.from_json(archive.read(result / "fit.npz", kind=FIT_KIND)[1].get("provenance"))
    return None if found is None else found.privacy


def plain(spent: Spent | None) -> dict[str, Any] | None:
    """The same as JSON, with its sentence; an epsilon that is infinite, as there was no noise, is null."""
    if spent is None:
        return None
    return {"says": str(spent), **spent._asdict(), "epsilon": None if math.isinf(spent.epsilon) else spent.epsilon}
