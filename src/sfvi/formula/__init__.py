"""Mixed models by formula, for silos whose rows may not be pooled."""

from .agreement import Agreement, Moments, Summary, agree, glmm_summary
from .building import Glmm, glmm, glmm_arrays, glmm_groups, glmm_model
from .fitted import GlmmFit, GlmmSummary, name_groups

__all__ = [
    "Agreement",
    "Glmm",
    "GlmmFit",
    "GlmmSummary",
    "Moments",
    "Summary",
    "agree",
    "glmm",
    "glmm_arrays",
    "glmm_groups",
    "glmm_model",
    "glmm_summary",
    "name_groups",
]
