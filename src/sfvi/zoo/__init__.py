"""Models of the paper, one file each."""

from .deep_latent_gaussian import deep_latent_gaussian, image_encoder
from .logistic_mixed import logistic_mixed_model

__all__ = ["deep_latent_gaussian", "image_encoder", "logistic_mixed_model"]
