"""Priors by name: defaults that depend on the agreement alone, those that a user gives, and both as a table."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpyro.distributions as dist
import pandas as pd
from numpyro.distributions import constraints

from ..errors import OptionError
from .design import Design

WIDTH = 2.5  # default prior sds, in units of the outcome per sd of the predictor
CONCENTRATION = 2.0  # of LKJ
Prior = dist.Distribution | float
POSITIVE = (constraints.positive, constraints.nonnegative)


@dataclasses.dataclass(frozen=True)
class Priors:
    r"""The priors of a model.

    Defaults, with $s_y$ the outcome's agreed sd in the gaussian family and 1 otherwise, and $s_k$ the product of the
    agreed sds of a column's numeric variables:

    - coefficients: $N(0, (2.5\, s_y / s_k)^2)$;
    - `Intercept`: $N(\mu, (2.5\, s_y)^2)$, $\mu$ the mean outcome, its log with a log link, 0 with a logit link, less
      the mean offset. With `standardize` it is the prior of the linear predictor at the predictors' means, otherwise at
      0, and then wider as the slopes' priors make it;
    - `sd(...)`: half-normal of scale $2.5\, s_y / s_k$; that of an intercept again at the means, with `standardize`;
    - `cor(...)`: LKJ with concentration 2;
    - `sigma`: exponential with mean $s_y$; `concentration` of the negative binomial: gamma(2, 0.1).

    Without an intercept, the levels of a factor that has them all are treated as intercepts. Without such a factor too,
    coefficients must reach the outcome's level: root mean squares take the place of sds.

    Attributes:
        coefficients: By label.
        sds: By name.
        correlations: LKJ concentrations by name, for factors with several effects.
        extra: Of the family's own parameter, by name; empty if it has none.
        given: Which names were chosen by the user.
    """

    coefficients: dict[str, dist.Distribution]
    sds: dict[str, dist.Distribution]
    correlations: dict[str, float]
    extra: dict[str, dist.Distribution]
    given: tuple[str, ...]

    def table(self) -> pd.DataFrame:
        """What is used, by name."""
        parts = {
            "coefficient": self.coefficients,
            "sd of effects": self.sds,
            "correlation of effects (LKJ)": self.correlations,
            "parameter of the family": self.extra,
        }
        rows = {
            name: [show(prior), of, "given" if name in self.given else "default"]
            for of, priors in parts.items()
            for name, prior in priors.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index", columns=["prior", "of", "from"])


def settle(design: Design, given: Mapping[str, Prior] | None) -> Priors:
    """The default priors of a design, with the user's in the place of some.

    Args:
        design: The design.
        given: Priors by name.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise OptionError(
            f"priors is {given!r}; give a mapping from name to prior, like {{'Intercept': dist.Normal(0, 5)}}."
        )
    default = _defaults(design)
    names = [*default.coefficients, *default.sds, *default.correlations, *default.extra]
    for name, prior in given.items():
        if name not in names:
            raise OptionError(f"There is no {name!r} to have a prior; there are {', '.join(names)}.")
        _check(name, prior, default)
    return Priors(
        *(
            {name: given.get(name, prior) for name, prior in part.items()}
            for part in (default.coefficients, default.sds, default.correlations, default.extra)
        ),  # pyright: ignore[reportArgumentType]
        given=tuple(given),
    )


def sd_name(effect: str, block: str) -> str:
    """The name of the sd of an effect among groups."""
    return f"sd({effect}|{block})"


def correlation_names(effects: Sequence[str], block: str) -> list[str]:
    """The names of the correlations between the effects of a factor, pair by pair."""
    return [f"cor({left},{right}|{block})" for left, right in itertools.combinations(effects, 2)]


def show(prior: Prior) -> str:
    """A prior as one would write it."""
    if not isinstance(prior, dist.Distribution):
        return f"{prior:g}"
    names = prior.reparametrized_params or list(prior.arg_constraints)
    numbers = [f"{float(np.asarray(getattr(prior, name))):.4g}" for name in names if np.ndim(getattr(prior, name)) == 0]
    return f"{type(prior).__name__}({', '.join(numbers)})"


def _defaults(design):
    agreement, recoding = design.agreement, design.recoding
    level, spread = _outcome_level(design)
    sizes = recoding.sizes
    if recoding.constant is None:
        spread = float(np.hypot(spread, level))
        sizes = np.array([np.prod([np.hypot(*_mean_sd(design, c)) for c in k.numeric]) for k in design.columns])
    scales = WIDTH * spread / sizes
    locations = np.zeros(len(sizes))
    if recoding.constant is not None:
        locations = level * recoding.constant
        if not agreement.standardize:  # at 0, where slopes may lead far
            slopes = np.array([bool(column.numeric) for column in design.columns])
            far = np.sum((recoding.at_means * scales)[slopes] ** 2)
            scales = np.where(recoding.constant > 0, np.sqrt(scales**2 + far), scales)
    coefficients = {
        label: dist.Normal(float(loc), float(scale))
        for label, loc, scale in zip(design.labels, locations, scales, strict=True)
    }
    sds, correlations = {}, {}
    for block in design.blocks:
        for effect, size in zip(block.effects, block.recoding.sizes, strict=True):
            sds[sd_name(effect, block.name)] = dist.HalfNormal(float(WIDTH * spread / size))
        if len(block.effects) > 1:
            correlations[f"cor({block.name})"] = CONCENTRATION
    extra: dict[str, dist.Distribution] = {}
    if design.outcome.extra == "sigma":
        extra["sigma"] = dist.Exponential(float(1 / spread))
    elif design.outcome.extra is not None:
        extra[design.outcome.extra] = dist.Gamma(2.0, 0.1)
    return Priors(coefficients, sds, correlations, extra, ())


def _outcome_level(design):
    """Where the linear predictor is expected, and how far it spreads."""
    moments = design.agreement.outcome
    if moments is None:
        return -design.mean_offset, 1.0
    if design.outcome.link == "log":
        return float(np.log(max(moments.mean, 0.5 / moments.count))) - design.mean_offset, 1.0
    return moments.mean - design.mean_offset, moments.sd


def _mean_sd(design, component):
    moments = design.moments(component)
    return moments.mean, moments.sd


def _check(name, prior, default):
    if name in default.correlations:
        if isinstance(prior, bool) or not isinstance(prior, int | float) or not 0 < prior < float("inf"):
            raise OptionError(f"The prior of {name} is {prior!r}; give the concentration of LKJ, a positive number.")
        return
    if not isinstance(prior, dist.Distribution) or prior.shape() != ():
        raise OptionError(f"The prior of {name} is {prior!r}; give a NumPyro distribution of a single number.")
    if name in default.coefficients and prior.support is not constraints.real:
        raise OptionError(
            f"The prior of {name} is {show(prior)}; give one on the whole real line, like dist.Normal(0, 1)."
        )
    if name not in default.coefficients and not any(prior.support is kind for kind in POSITIVE):
        raise OptionError(
            f"The prior of {name} is {show(prior)}; give one of positive numbers, like dist.HalfNormal(1)."
        )
