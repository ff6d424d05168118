"""Data sets that ship with the package, and ways to split them over silos."""

from .partition import split_units
from .six_cities import six_cities

__all__ = ["six_cities", "split_units"]
