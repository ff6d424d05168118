"""Reports: one HTML file that holds all it needs, for the server and for each silo."""

from .page import write
from .server import server_report
from .silo import silo_report

__all__ = ["server_report", "silo_report", "write"]
