"""What our answers are compared with, one file each."""

from .avitm import Avitm, AvitmFit, avitm
from .fed_avg import fed_avg
from .fed_soul import FedSoul, ReportedFedSoul, fed_soul
from .meta_analysis import meta_analysis
from .nuts import NutsDraws, nuts
from .p_fed_bayes import PFedBayes, p_fed_bayes

__all__ = [
    "Avitm",
    "AvitmFit",
    "FedSoul",
    "NutsDraws",
    "PFedBayes",
    "ReportedFedSoul",
    "avitm",
    "fed_avg",
    "fed_soul",
    "meta_analysis",
    "nuts",
    "p_fed_bayes",
]
