"""What our answers are compared with, one file each."""

from .avitm import Avitm, AvitmFit, avitm
from .fed_avg import fed_avg
from .fed_soul import FedSoul, ReportedFedSoul, fed_soul
from .meta_analysis import meta_analysis
from .nuts import NutsDraws, nuts
from .p_fed_bayes import PFedBayes, p_fed_bayes
from .without_exchange import Majority, each_alone, majority, pooled

__all__ = [
    "Avitm",
    "AvitmFit",
    "FedSoul",
    "Majority",
    "NutsDraws",
    "PFedBayes",
    "ReportedFedSoul",
    "avitm",
    "each_alone",
    "fed_avg",
    "fed_soul",
    "majority",
    "meta_analysis",
    "nuts",
    "p_fed_bayes",
    "pooled",
]
