"""The paper's models, one file each."""

from .logistic_mixed import logistic_mixed_model

__all__ = ["logistic_mixed_model"]
