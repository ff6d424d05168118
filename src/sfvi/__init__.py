"""Structured federated variational inference: hierarchical Bayesian models over data that may not be pooled."""

from . import data, families, zoo
from .algorithms import SFVI
from .convergence import Check, Convergence, StoppingRule
from .engines.progress import RunProgress
from .errors import ArchiveError, DataError, DivergenceError, ModelError, OptionError, SfviError
from .fitting import Fit, fit, load
from .model import StructuredModel
from .posterior import GlobalPosterior, SiloPosterior

__all__ = [
    "SFVI",
    "ArchiveError",
    "Check",
    "Convergence",
    "DataError",
    "DivergenceError",
    "Fit",
    "GlobalPosterior",
    "ModelError",
    "OptionError",
    "RunProgress",
    "SfviError",
    "SiloPosterior",
    "StoppingRule",
    "StructuredModel",
    "data",
    "families",
    "fit",
    "load",
    "zoo",
]
