"""Federated algorithms, each as the same few pure functions."""

from . import participation
from .base import AlgorithmOptions, FederatedAlgorithm
from .elbo import Elbo
from .fixed_noise import FixedNoise
from .privacy import SiloPrivacy, Spent, UnitPrivacy
from .refit import refit
from .sfvi import SFVI, FastStart
from .sfvi_avg import SFVIAvg
from .sites import Sites

__all__ = [
    "SFVI",
    "AlgorithmOptions",
    "Elbo",
    "FastStart",
    "FederatedAlgorithm",
    "FixedNoise",
    "SFVIAvg",
    "SiloPrivacy",
    "Sites",
    "Spent",
    "UnitPrivacy",
    "participation",
    "refit",
]
