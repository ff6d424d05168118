"""What a fit returns: distributions to draw from, by site name, in the model's own space."""

from .of_globals import GlobalPosterior
from .of_silo import SILO_KIND, SiloPosterior

__all__ = ["SILO_KIND", "GlobalPosterior", "SiloPosterior"]
