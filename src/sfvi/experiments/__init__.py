"""Tables and figures of the paper, and more: one file each, run by `sfvi reproduce`."""

from .fast_start import FastStartExperiment
from .hier_bnn import HierBnnExperiment
from .hier_bnn_choice import HierBnnChoiceExperiment
from .multinomial import MultinomialExperiment
from .privacy import PrivacyExperiment
from .reproduce import names, reproduce
from .six_cities import SixCitiesExperiment
from .topics import TopicsExperiment

EXPERIMENTS = {
    "fast_start": FastStartExperiment,
    "hier_bnn": HierBnnExperiment,
    "hier_bnn_choice": HierBnnChoiceExperiment,
    "multinomial": MultinomialExperiment,
    "privacy": PrivacyExperiment,
    "six_cities": SixCitiesExperiment,
    "topics": TopicsExperiment,
}

__all__ = ["EXPERIMENTS", "names", "reproduce"]
