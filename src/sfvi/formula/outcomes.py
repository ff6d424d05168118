r"""The outcome families: what values they take, their links, and the observation $p(y \mid \eta)$."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from ..errors import DataError, OptionError
from .frames import Table
from .parsing import PROPORTION, is_call, values


class Outcome(NamedTuple):
    """A family of outcomes.

    Attributes:
        name: Of the family.
        link: What the linear predictor is of the mean: "identity", "logit" or "log".
        ratio: What the exponential of a coefficient is called, if it means something.
        extra: Name of the family's own parameter, if it has one.
        needs_moments: Whether default priors need the outcome's mean and sd.
        observe: The distribution of y given eta, the extra parameter and the trials.
    """

    name: str
    link: str
    ratio: str | None
    extra: str | None
    needs_moments: bool
    observe: Callable[[Any, Any, Any], dist.Distribution]


def _negative_binomial(eta, concentration, _):
    return dist.NegativeBinomialLogits(total_count=concentration, logits=eta - jnp.log(concentration))


OUTCOMES = {
    outcome.name: outcome
    for outcome in (
        Outcome("gaussian", "identity", None, "sigma", True, lambda eta, sigma, _: dist.Normal(eta, sigma)),
        Outcome("bernoulli", "logit", "odds ratio", None, False, lambda eta, *_: dist.Bernoulli(logits=eta)),
        Outcome("binomial", "logit", "odds ratio", None, False, lambda eta, _, n: dist.Binomial(n, logits=eta)),
        Outcome("poisson", "log", "rate ratio", None, True, lambda eta, *_: dist.Poisson(jnp.exp(eta))),
        Outcome("negativebinomial", "log", "rate ratio", "concentration", True, _negative_binomial),
    )
}


def lookup(family: str) -> Outcome:
    """The family of a name."""
    if family not in OUTCOMES:
        raise OptionError(f"family is {family!r}; choose one of {', '.join(map(repr, OUTCOMES))}.")
    return OUTCOMES[family]


def observed(outcome: Outcome, response: Any, table: Table) -> tuple[np.ndarray, np.ndarray | None]:
    """A silo's outcomes, checked, and the trials of a binomial."""
    if (outcome.name == "binomial") != is_call(response, *PROPORTION):
        raise OptionError(
            f"family is {outcome.name!r} and the left side {response.name}; the binomial family, and only that, takes "
            "prop(successes, trials)."
        )
    if outcome.name == "binomial":
        return _binomial(response, table)
    if has_level(response) and outcome.name != "bernoulli":
        raise OptionError(f"family is {outcome.name!r}; a level of the outcome is for 'bernoulli'.")
    y = _outcome(response, table)
    bad, should = ~np.isfinite(y), "be finite"
    if outcome.name == "bernoulli":
        bad, should = ~np.isin(y, (0, 1)), "be 0 or 1"
    elif outcome.link == "log":
        bad, should = ~_is_count(y), "be whole numbers, 0 or more"
    _refuse(bad, y, response.name, should, outcome, table.silo)
    return (y if outcome.name == "gaussian" else y.astype(np.int32)), None


def has_level(response: Any) -> bool:
    """Whether a level was chosen: outcome['level']."""
    return getattr(response, "reference", None) is not None


def _outcome(response, table):
    if has_level(response):
        level = response.reference
        if table.kinds[response.name] == "numeric":
            raise OptionError(
                f"{response.name}[{level!r}] chooses a level, but the column is numeric; write {response.name}."
            )
        return (table.frame[response.name] == level).to_numpy(float)
    if not hasattr(response, "call") and table.kinds[response.name] == "categorical":
        raise DataError(
            f"Silo {table.silo!r}: the outcome {response.name!r} holds text or categories; for one of its levels write "
            f"{response.name}['level'] ~ ..."
        )
    return values(response.call if hasattr(response, "call") else response, table.frame).astype(float)


def trials_of(response: Any, table: Table) -> np.ndarray:
    """The trials of a binomial outcome, checked."""
    trials = values(response.call.args[1], table.frame).astype(float)
    bad, should = ~_is_count(trials) | (trials < 1), "have whole numbers of trials, 1 or more"
    _refuse(bad, trials, response.name, should, OUTCOMES["binomial"], table.silo)
    return trials.astype(np.int32)


def _binomial(response, table):
    trials = trials_of(response, table)
    successes = values(response.call.args[0], table.frame).astype(float)
    bad, should = ~_is_count(successes) | (successes > trials), "have whole numbers of successes, from 0 to the trials"
    _refuse(bad, successes, response.name, should, OUTCOMES["binomial"], table.silo)
    return successes.astype(np.int32), trials


def _is_count(numbers):
    return np.isfinite(numbers) & (numbers >= 0) & (numbers == np.round(numbers))


def _refuse(bad, numbers, name, should, outcome, silo):
    if bad.any():
        raise DataError(
            f"Silo {silo!r}: the outcome {name} must {should} for the {outcome.name} family, but {bad.sum()} of "
            f"{len(bad)} rows are not, the first {numbers[bad][0]:g}."
        )
