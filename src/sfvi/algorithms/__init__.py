"""Federated algorithms, each as the same few pure functions."""

from . import participation
from .base import AlgorithmOptions, FederatedAlgorithm
from .elbo import Elbo
from .refit import refit
from .sfvi import SFVI, FastStart
from .sfvi_avg import SFVIAvg

__all__ = ["SFVI", "AlgorithmOptions", "Elbo", "FastStart", "FederatedAlgorithm", "SFVIAvg", "participation", "refit"]
