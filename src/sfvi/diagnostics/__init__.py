"""Can I believe this posterior? Checks that need no silo's data at the server, each with a verdict in a sentence."""

from .evidence import Evidence
from .importance import ImportanceCheck
from .optimum import OptimumCheck
from .predictive import PredictiveCheck
from .rounds import RoundsCheck
from .units import UnitsCheck
from .verdicts import Check, Diagnosis, Trust

__all__ = [
    "Check",
    "Diagnosis",
    "Evidence",
    "ImportanceCheck",
    "OptimumCheck",
    "PredictiveCheck",
    "RoundsCheck",
    "Trust",
    "UnitsCheck",
]
