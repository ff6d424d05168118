"""Models of the paper and other common ones, one file each."""

from .bayesian_networks import families_for_networks, fed_pop, hierarchical_bnn
from .deep_latent_gaussian import deep_latent_gaussian, image_encoder
from .linear_mixed import linear_mixed_model, simulate_linear_mixed
from .logistic_mixed import logistic_mixed_model
from .multinomial_regression import multinomial_regression
from .poisson_mixed import poisson_mixed_model, simulate_poisson_mixed
from .prod_lda import document_encoder, families_for_topics, prod_lda, word_probabilities

__all__ = [
    "deep_latent_gaussian",
    "document_encoder",
    "families_for_networks",
    "families_for_topics",
    "fed_pop",
    "hierarchical_bnn",
    "image_encoder",
    "linear_mixed_model",
    "logistic_mixed_model",
    "multinomial_regression",
    "poisson_mixed_model",
    "prod_lda",
    "simulate_linear_mixed",
    "simulate_poisson_mixed",
    "word_probabilities",
]
