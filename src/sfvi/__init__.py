"""Structured federated variational inference: hierarchical Bayesian models over data that may not be pooled."""

from . import bounds, data, diagnostics, families, formula, zoo
from .algorithms import SFVI, FastStart, FixedNoise, SFVIAvg, SiloPrivacy, Sites, UnitPrivacy, participation
from .calibration import Calibration, simulation_based_calibration
from .convergence import Check, Convergence, StoppingRule
from .engines.progress import RunProgress
from .errors import ArchiveError, DataError, DivergenceError, ModelError, OptionError, SfviError
from .fitting import fit
from .formula import glmm
from .model import StructuredModel
from .posterior import GlobalPosterior, SiloPosterior
from .results import Fit, load
from .silo_fitting import fit_silo

__all__ = [
    "SFVI",
    "ArchiveError",
    "Calibration",
    "Check",
    "Convergence",
    "DataError",
    "DivergenceError",
    "FastStart",
    "Fit",
    "FixedNoise",
    "GlobalPosterior",
    "ModelError",
    "OptionError",
    "RunProgress",
    "SFVIAvg",
    "SfviError",
    "SiloPosterior",
    "SiloPrivacy",
    "Sites",
    "StoppingRule",
    "StructuredModel",
    "UnitPrivacy",
    "bounds",
    "data",
    "diagnostics",
    "families",
    "fit",
    "fit_silo",
    "formula",
    "glmm",
    "load",
    "participation",
    "simulation_based_calibration",
    "zoo",
]
