"""From two NumPyro programs to log densities of flat unconstrained latents."""

from .owners import attribute
from .programs import PopulationProgram, SiloData, SiloProgram, total
from .structured import StructuredModel

__all__ = ["PopulationProgram", "SiloData", "SiloProgram", "StructuredModel", "attribute", "total"]
