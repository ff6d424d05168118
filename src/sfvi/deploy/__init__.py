"""Runs over a network: one codec, a silo's side and the server's side; NVFlare and Flower carry the bytes."""

from .data import SiloInput
from .spec import RunSpec
from .wire import Wire

__all__ = ["RunSpec", "SiloInput", "Wire"]
