"""Variational families: choose one with the lower-case functions, they build the classes."""

from .amortized import Amortized, AmortizedBlock, amortized
from .base import AbstractGlobalFamily
from .block import BlockGaussian, block
from .flow import FlowSettings, NormalizingFlow, flow
from .gaussian import FullGaussian, MeanFieldGaussian, full, mean_field
from .low_rank import LowRankGaussian, low_rank
from .structured import Local, StructuredLocal

__all__ = [
    "AbstractGlobalFamily",
    "Amortized",
    "AmortizedBlock",
    "BlockGaussian",
    "FlowSettings",
    "FullGaussian",
    "Local",
    "LowRankGaussian",
    "MeanFieldGaussian",
    "NormalizingFlow",
    "StructuredLocal",
    "amortized",
    "block",
    "flow",
    "full",
    "low_rank",
    "mean_field",
]
