"""Which topic model is ahead of which: the paper's claims, and ours against what a user would pick instead."""

from typing import Literal, NamedTuple

import numpy as np
from scipy.stats import t

from ..scores import mean_and_error
from .base import Result

Method = tuple[str, str]  # model and inference
RANDOM: Method = ("nothing learned", "random topics")
Score = Literal["npmi", "umass", "diversity", "perplexity", "elbo at the end"]
ELBO: Score = "elbo at the end"
WORDS: dict[Score, str] = {
    "npmi": "is more coherent (NPMI) than",
    "umass": "is more coherent (UMass) than",
    "diversity": "is more diverse than",
    "perplexity": "has less perplexity than",
    ELBO: "has a higher ELBO than",
}
CONFIDENCE = 0.95


class Claim(NamedTuple):
    """That a method has the better score."""

    one: Method
    other: Method
    score: Score


def _of_the_paper(form):
    sfvi, average, alone = (form, "SFVI"), (form, "SFVI-Avg"), (form, "Independent")
    coherence = ((sfvi, alone), (average, alone), (average, sfvi))
    scores: tuple[Score, ...] = ("umass", "npmi")
    return *(Claim(*pair, score) for score in scores for pair in coherence), Claim(sfvi, average, ELBO)


def _of_ours():
    avitm, less, lda = ("autoencoder", "AVITM"), ("autoencoder", "AVITM, less dropout"), ("LDA", "gensim")
    pairs = [(("published", "SFVI"), rival) for rival in (avitm, less, lda)]
    pairs += [(("published, learned", "SFVI"), avitm), (("published, amortized", "SFVI"), avitm)]
    scores: tuple[Score, ...] = ("npmi", "umass", "diversity", "perplexity")
    return tuple(Claim(*pair, score) for pair in pairs for score in scores)


OF_THE_PAPER: tuple[Claim, ...] = (
    Claim(("printed", "SFVI"), RANDOM, "npmi"),
    *_of_the_paper("printed"),
    Claim(("published", "SFVI"), RANDOM, "npmi"),
    *_of_the_paper("published"),
)
OF_OURS = _of_ours()


def judged(claim: Claim, one: dict[int, Result], other: dict[int, Result]) -> str | None:
    """A line with both scores, the difference on the same documents, and whether it is clear; None if nothing is known.

    It is clear if zero is outside the interval of 95% that Student's t gives for the mean of a few seeds. Runs that
    diverged do not count.

    Args:
        claim: What is claimed.
        one: Results of its first method, by seed.
        other: Of the second.
    """

    def score(run):
        return np.nan if "broke" in run else np.mean(run.get(claim.score, np.nan))

    scores = np.array([[score(one[seed]), score(other[seed])] for seed in one if seed in other]).reshape(-1, 2)
    scores = scores[np.isfinite(scores).all(axis=1)]
    if not len(scores):
        return None
    mean, error = mean_and_error(scores[:, 0] - scores[:, 1])
    sign = -1.0 if claim.score == "perplexity" else 1.0
    verdict = "cannot be told"
    if len(scores) > 1 and abs(mean) > t.ppf((1 + CONFIDENCE) / 2, len(scores) - 1) * error:
        verdict = "yes" if sign * mean > 0 else "no"
    form = {ELBO: ",.0f", "perplexity": ".0f"}.get(claim.score, ".3f")
    spread = "" if np.isnan(error) else f" ± {format(error, form)}"
    values = " and ".join(format(value, form) for value in scores.mean(0))
    who = f"{claim.one[0]}, {claim.one[1]} {WORDS[claim.score]} {', '.join(claim.other)}"
    seeds = f"{len(scores)} seed{'s' if len(scores) > 1 else ''}"
    return f"- {who}: {verdict} ({values}; difference {format(mean, '+' + form)}{spread}, {seeds})."
