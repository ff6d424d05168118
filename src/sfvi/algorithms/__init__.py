"""The algorithms, each five pure functions."""

from .base import AlgorithmOptions, FederatedAlgorithm
from .sfvi import SFVI

__all__ = ["SFVI", "AlgorithmOptions", "FederatedAlgorithm"]
