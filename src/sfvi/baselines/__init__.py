"""What our answers are compared with, one file each."""

from .fed_avg import fed_avg
from .meta_analysis import meta_analysis
from .nuts import NutsDraws, nuts

__all__ = ["NutsDraws", "fed_avg", "meta_analysis", "nuts"]
