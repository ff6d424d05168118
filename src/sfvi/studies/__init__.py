"""Fits described by plain values and kept in folders: what the commands `fit`, `report` and `diagnose` do."""

from .reading import Judged, Reports, Source, diagnose, report
from .running import Result, run
from .study import Study

__all__ = ["Judged", "Reports", "Result", "Source", "Study", "diagnose", "report", "run"]
