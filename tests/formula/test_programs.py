"""The programs of a formula have the density that one would write down for it, on the original scale."""

import jax
import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest
import scipy.stats as stats
from numpyro import handlers
from numpyro.infer.util import log_density

import sfvi

from .frames import mixed_table, split

TABLE = mixed_table(24).assign(
    binary=lambda t: (t["n"] > 2).astype(int), successes=lambda t: t["n"], trials=lambda t: t["n"] + t["k"]
)
SILOS = split(TABLE, np.arange(24) % 2)
RIGHT = "x * g + offset(log(t)) + (x | id) + (1 | silo)"
LEFT = {
    "gaussian": "y",
    "bernoulli": "binary",
    "binomial": "p(successes, trials)",
    "poisson": "n",
    "negativebinomial": "n",
}
MEAN, SD = TABLE["x"].mean(), TABLE["x"].std(ddof=0)
LEVELS = {name: np.sort(part["id"].unique()) for name, part in SILOS.items()}


def drawn(program, seed=1):
    """A point: values of all latents, and what else is computed from them."""
    trace = handlers.trace(handlers.seed(program, seed)).get_trace()
    latents = {n: s["value"] for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
    for name in latents:  # not so far out that probabilities are 0 or 1
        if name.startswith("beta") or "/b(" in name:
            latents[name] = 0.02 * latents[name]
    trace = handlers.trace(handlers.substitute(handlers.seed(program, seed), latents)).get_trace()
    return latents, {n: np.asarray(s["value"]) for n, s in trace.items() if s["type"] in ("sample", "deterministic")}


def likelihood(family, y, eta, table, sites):
    if family == "gaussian":
        return stats.norm.logpdf(y, eta, sites["sigma"]).sum()
    if family == "bernoulli":
        return stats.bernoulli.logpmf(table["binary"], 1 / (1 + np.exp(-eta))).sum()
    if family == "binomial":
        return stats.binom.logpmf(table["successes"], table["trials"], 1 / (1 + np.exp(-eta))).sum()
    if family == "poisson":
        return stats.poisson.logpmf(table["n"], np.exp(eta)).sum()
    size = sites["concentration"]
    return stats.nbinom.logpmf(table["n"], size, size / (size + np.exp(eta))).sum()


def by_hand(family, sites, scale, *, standardize):
    """The joint density of everything as reported, every row written out.

    Latents inside are measured in other units; the factors by which they differ are the volume at the end.
    """
    beta, spread = sites["beta"], TABLE["y"].std(ddof=0) if family == "gaussian" else 1.0
    level = {"gaussian": TABLE["y"].mean(), "poisson": np.log(TABLE["n"].mean())}
    level["negativebinomial"] = level["poisson"]
    start = level.get(family, 0.0) - np.log(TABLE["t"]).mean()
    widths = 2.5 * spread * np.array([1.0, 1 / SD, 1.0, 1.0, 1 / SD, 1 / SD])
    center, intercept = MEAN if standardize else 0.0, widths[0]
    if not standardize:
        intercept = np.hypot(widths[0], MEAN * widths[1])
    total = stats.norm.logpdf(beta[0] + center * beta[1], start, intercept)
    total += stats.norm.logpdf(beta[1:], 0.0, widths[1:]).sum()
    size = SD if standardize else 1.0
    inner = np.array([float(sites[f"sd({name}|id) scaled"]) for name in ("1", "x")]) * scale / np.array([1.0, size])
    total += stats.halfnorm.logpdf(inner, scale=2.5 * spread / np.array([1.0, SD])).sum()
    total += stats.halfnorm.logpdf(sites["sd(1|silo)"], scale=2.5 * spread)
    total += float(dist.LKJCholesky(2, 2.0).log_prob(sites["root(id)"]))
    if family == "gaussian":
        total += stats.expon.logpdf(sites["sigma"], scale=spread)
    if family == "negativebinomial":
        total += stats.gamma.logpdf(sites["concentration"], 2.0, scale=10.0)
    sds, correlation = (sites["sd(1|id)"], sites["sd(x|id)"]), sites["cor(1,x|id)"]
    covariance = np.outer(sds, sds) * np.array([[1.0, correlation], [correlation, 1.0]])
    for name, part in SILOS.items():
        own, ids = sites[f"{name}/b(silo)"], sites[f"{name}/b(id)"]
        total += stats.norm.logpdf(own, 0.0, sites["sd(1|silo)"])
        total += stats.multivariate_normal.logpdf(ids, np.zeros(2), covariance, allow_singular=True).sum()
        b = ids[np.searchsorted(LEVELS[name], part["id"])]
        x, second, third = part["x"], part["g"] == "b", part["g"] == "c"
        design = np.stack([np.ones(len(x)), x, second, third, x * second, x * third], axis=1)
        eta = design @ beta + np.log(part["t"]) + own + b[:, 0] + b[:, 1] * x
        total += likelihood(family, part["y"], eta, part, sites)
    groups = sum(map(len, LEVELS.values()))
    volume = np.log(scale) * (6 + 2 + 1 + 2 * groups + len(SILOS) + len(TABLE) + 1) - np.log(size) * (3 + 1 + groups)
    return total + volume if family == "gaussian" else total - np.log(size) * (3 + 1 + groups)


@pytest.mark.parametrize("standardize", [True, False], ids=["standardized", "as-is"])
@pytest.mark.parametrize("family", LEFT)
def test_density_is_the_one_written_by_hand(family, standardize):
    model = sfvi.glmm(f"{LEFT[family]} ~ {RIGHT}", family=family, silos=SILOS, standardize=standardize)
    program = model.model.as_one_program(model.silos)
    latents, sites = drawn(program)
    actual, _ = log_density(program, (), {}, latents)
    scale = TABLE["y"].std(ddof=0) if family == "gaussian" and standardize else 1.0
    rtol = 1e-6 if "binomial" in family else 1e-9  # NumPyro counts combinations in single precision
    np.testing.assert_allclose(actual, by_hand(family, sites, scale, standardize=standardize), rtol=rtol)


def test_draws_of_the_recoded_prior_have_the_written_one():
    """Coefficients drawn inside have the priors' means and sds outside, within four standard errors."""
    priors = {"x": dist.StudentT(5.0, 1.0, 0.1), "g[b]": dist.Laplace(3.0, 1.0)}
    model = sfvi.glmm("y ~ x + g", family="gaussian", silos=SILOS, priors=priors)
    keys = jax.random.split(jax.random.key(0), 4000)

    def draw(key):
        trace = handlers.trace(handlers.seed(model.model.population.program, key)).get_trace()
        return trace["beta"]["value"]

    beta = np.asarray(jax.vmap(draw)(keys))
    at_mean = beta[:, 0] + TABLE["x"].mean() * beta[:, 1]
    spread = TABLE["y"].std(ddof=0)
    for values, (mean, sd) in {
        "at mean": (at_mean, (TABLE["y"].mean(), 2.5 * spread)),
        "x": (beta[:, 1], (1.0, 0.1 * np.sqrt(5 / 3))),
        "g[b]": (beta[:, 2], (3.0, np.sqrt(2.0))),
        "g[c]": (beta[:, 3], (0.0, 2.5 * spread)),
    }.values():
        assert abs(values.mean() - mean) < 4 * sd / np.sqrt(len(keys))
        assert abs(values.std() / sd - 1) < 0.15


def test_default_priors_without_an_intercept():
    """Levels are intercepts; a lone slope must lead to the outcome's level by itself."""
    table = pd.DataFrame({"y": [996.0, 1004.0] * 2, "x": [49.0, 49.0, 51.0, 51.0], "g": list("abba")})
    inside, shown = (
        sfvi.glmm("y ~ 0 + g + x", family="gaussian", silos={"a": table}, standardize=standardize).priors["prior"]
        for standardize in (True, False)
    )
    assert inside["g[a]"] == inside["g[b]"] == "Normal(1000, 10)"
    assert shown["x"] == "Normal(0, 10)"
    assert shown["g[a]"] == shown["g[b]"] == f"Normal(1000, {np.hypot(10.0, 50.0 * 10.0):.4g})"
    assert shown["sigma"] == "Exponential(0.25)"
    lone = sfvi.glmm("y ~ 0 + x", family="gaussian", silos={"a": table}).priors["prior"]
    assert lone["x"] == f"Normal(0, {2.5 * np.hypot(4.0, 1000.0) / np.hypot(1.0, 50.0):.4g})"
    assert shown.index.equals(pd.Index(["g[a]", "g[b]", "x", "sigma"]))


def test_effects_outside_a_bar_are_not_needed():
    """No fixed effects, no groups: each alone makes a model."""
    only_groups = sfvi.glmm("y ~ 0 + (1 | id)", family="gaussian", silos=SILOS)
    assert "x" not in only_groups.silos["0"]
    assert [site.name for site in only_groups.model.population.layout.sites] == ["sigma scaled", "sd(1|id) scaled"]
    constant = pd.DataFrame({"y": [0, 1, 1]})
    alone = sfvi.glmm("y ~ 1", family="bernoulli", silos={"a": constant})
    assert [site.name for site in alone.model.population.layout.sites] == ["beta"]
