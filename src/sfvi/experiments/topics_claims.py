"""Which topic model is ahead of which: the paper's claims, and ours against what a user would pick instead."""

from typing import Literal, NamedTuple

import numpy as np

from ..scores import mean_and_error
from .base import Result

Method = tuple[str, str]  # model and inference
Score = Literal["npmi", "umass", "diversity", "elbo at the end"]
ELBO: Score = "elbo at the end"
CLEARLY = 2.0  # standard errors


class Claim(NamedTuple):
    """That a method has the higher score than another, or at least one as high."""

    text: str
    one: Method
    other: Method
    score: Score


def _of_the_paper(form):
    sfvi, average, alone = (form, "SFVI"), (form, "SFVI-Avg"), (form, "Independent")
    return (
        Claim(f"{form}: SFVI is more coherent (UMass) than silos alone", sfvi, alone, "umass"),
        Claim(f"{form}: SFVI-Avg is more coherent (UMass) than silos alone", average, alone, "umass"),
        Claim(f"{form}: SFVI-Avg is more coherent (UMass) than SFVI", average, sfvi, "umass"),
        Claim(f"{form}: SFVI's ELBO is higher than SFVI-Avg's", sfvi, average, ELBO),
    )


def _against(rival, scores):
    names: dict[Score, str] = {"npmi": "coherent (NPMI)", "umass": "coherent (UMass)", "diversity": "diverse"}
    ours: tuple[Method, ...] = tuple(("published", method) for method in ("SFVI", "SFVI-Avg", "Sites"))
    return tuple(
        Claim(f"{one[1]} is more {names[score]} than {rival[1]}", one, rival, score) for one in ours for score in scores
    )


OF_THE_PAPER = (*_of_the_paper("printed"), *_of_the_paper("published"))
OF_OURS = (
    *_against(("autoencoder", "AVITM"), ("npmi", "umass", "diversity")),
    *_against(("LDA", "gensim"), ("npmi",)),
)


def judged(claim: Claim, one: dict[int, Result], other: dict[int, Result]) -> str | None:
    """A line with both scores, the difference on the same documents, and whether it is clear; None if there is none.

    Args:
        claim: What is claimed.
        one: Results of its first method, by seed.
        other: Of the second.
    """
    seeds = [seed for seed in one if seed in other]
    if not seeds:
        return None
    scores = np.array([[np.mean(runs[seed][claim.score]) for seed in seeds] for runs in (one, other)])
    mean, error = mean_and_error(scores[0] - scores[1])
    form, signed = (",.0f", "+,.0f") if claim.score == ELBO else (".3f", "+.3f")
    if np.isnan(error):
        verdict, spread = "yes" if mean > 0 else "no", " on one seed"
    else:
        verdict = "yes" if mean > CLEARLY * error else "no" if mean < -CLEARLY * error else "cannot be told"
        spread = f" ± {format(error, form)}"
    values = " and ".join(format(value, form) for value in scores.mean(1))
    return f"- {claim.text}: {verdict} ({values}; difference {format(mean, signed)}{spread})."
