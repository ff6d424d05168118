"""Fitted formulas against the zoo, against exact marginal likelihoods and least squares, and against the truth."""

import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest
import scipy.optimize
import scipy.stats as stats

import sfvi

from .frames import six_cities, split


def close(actual, mean, sd, *, means=0.2, sds=0.1):
    """Means agree within `means` posterior sds, sds within the fraction `sds`."""
    np.testing.assert_array_less(np.abs(actual["mean"].to_numpy() - mean) / sd, means)
    np.testing.assert_array_less(np.abs(np.log(actual["sd"].to_numpy() / sd)), sds)


# Six cities, as the zoo has them; some of the children are enough for that

EVERY = 2  # child


@pytest.fixture(scope="module")
def wheeze():
    table = six_cities(EVERY)
    silos = {"north": table[table["child"] % 2 == 0], "south": table[table["child"] % 2 == 1]}
    priors = dict.fromkeys(["Intercept", "smoke", "age", "smoke:age"], dist.Normal(0.0, 10.0))
    priors["sd(1|child)"] = dist.LogNormal(0.0, 10.0)  # exp(-omega)
    model = sfvi.glmm(
        "wheeze ~ smoke * age + (1 | child)", family="bernoulli", silos=silos, priors=priors, standardize=False
    )
    return model, model.fit(key=0, num_rounds=2500)


def test_six_cities_are_those_of_the_zoo(wheeze):
    """The same model in two notations; the bound is locally enhanced in both. Two keys differ by 0.1 sds or less."""
    _, fitted = wheeze
    data = sfvi.data.six_cities()
    silos = {
        name: {key: leaf[:536:EVERY][i::2] for key, leaf in data.items()} for i, name in enumerate(("north", "south"))
    }
    zoo = sfvi.fit(sfvi.zoo.logistic_mixed_model(), silos, key=1, num_rounds=2500).posterior.sample(0, 10_000)
    summary = fitted.summary()
    close(summary.coefficients, np.mean(zoo["beta"], 0), np.std(zoo["beta"], 0))
    sd = np.exp(-np.asarray(zoo["omega"]))
    close(summary.sds, [sd.mean()], [sd.std()])
    assert "bound with 10 draws" in repr(fitted)


def test_names_and_ratios(wheeze):
    model, fitted = wheeze
    summary = fitted.summary(level=0.9)
    table = summary.coefficients
    assert list(table.index) == ["Intercept", "smoke", "age", "smoke:age"]
    assert list(table) == ["mean", "sd", "5%", "95%", "odds ratio", "odds ratio 5%", "odds ratio 95%"]
    np.testing.assert_allclose(table.loc["smoke", "odds ratio 95%"], np.exp(table.loc["smoke", "95%"]))
    assert table.loc["Intercept"].isna().sum() == 3
    assert list(summary.sds.index) == ["sd(1|child)"]
    assert model.groups["south"]["child"][:3] == [1, 3, 5]
    children = fitted.fit.silo("north").summary()
    assert list(children.index[:2]) == ["b(child)[0]", "b(child)[2]"]  # its own ids
    printed = repr(summary)
    for expected in ("smoke:age", "sd(1|child)", f"{4 * 536 // EVERY} rows in 2 silos"):
        assert expected in printed
    with pytest.raises(sfvi.OptionError, match="level is 95"):
        fitted.summary(level=95)


# Gaussian outcomes


def hierarchy(groups=60, rows=6, seed=3):
    generator = np.random.default_rng(seed)
    unit = np.repeat(np.arange(groups), rows)
    x = generator.normal(50.0, 10.0, groups * rows)
    y = 100.0 + 2.0 * x + 6.0 * generator.normal(size=groups)[unit] + 9.0 * generator.normal(size=groups * rows)
    return pd.DataFrame({"y": y, "x": x, "unit": unit})


def test_random_intercepts_by_the_exact_marginal_likelihood():
    """Laplace's approximation of the posterior of beta, log sd and log sigma, with effects integrated out exactly."""
    table = hierarchy()
    silos = split(table, table["unit"] % 2)
    model = sfvi.glmm("y ~ x + (1 | unit)", family="gaussian", silos=silos)
    summary = model.fit(key=0, num_rounds=2500).summary()
    design = np.stack([np.ones(len(table)), table["x"]], axis=1)
    same = np.equal.outer(table["unit"].to_numpy(), table["unit"].to_numpy())
    spread, center = table["y"].std(ddof=0), table["x"].mean()

    def minus_log_posterior(z):
        at_mean, slope, log_tau, log_sigma = z
        beta = np.array([at_mean - slope * center, slope])
        covariance = np.exp(2 * log_tau) * same + np.exp(2 * log_sigma) * np.eye(len(table))
        total = stats.multivariate_normal.logpdf(table["y"], design @ beta, covariance)
        total += stats.norm.logpdf(at_mean, table["y"].mean(), 2.5 * spread)
        total += stats.norm.logpdf(slope, 0.0, 2.5 * spread / table["x"].std(ddof=0))
        total += stats.halfnorm.logpdf(np.exp(log_tau), scale=2.5 * spread) + log_tau
        return -(total + stats.expon.logpdf(np.exp(log_sigma), scale=spread) + log_sigma)

    start = np.array([table["y"].mean(), 2.0, np.log(6.0), np.log(9.0)])
    mode = scipy.optimize.minimize(minus_log_posterior, start, method="BFGS", options={"gtol": 1e-3}).x
    steps = np.array([0.05, 0.005, 0.01, 0.005])
    hessian = np.array([[_second(minus_log_posterior, mode, steps, i, j) for j in range(4)] for i in range(4)])
    covariance = np.linalg.inv(hessian)
    slope = summary.coefficients.loc[["x"]]
    close(slope, mode[1], np.sqrt(covariance[1, 1]))
    to_zero = np.array([1.0, -center, 0.0, 0.0])
    close(summary.coefficients.loc[["Intercept"]], to_zero @ mode, np.sqrt(to_zero @ covariance @ to_zero))
    draws = np.exp(np.random.default_rng(0).multivariate_normal(mode[2:], covariance[2:, 2:], 100_000))
    close(summary.sds, draws[:, 0].mean(), draws[:, 0].std())
    close(summary.family, draws[:, 1].mean(), draws[:, 1].std())


def _second(fn, point, steps, i, j):
    """A second derivative by central differences."""
    a, b = np.eye(len(point))[i] * steps[i], np.eye(len(point))[j] * steps[j]
    return (fn(point + a + b) - fn(point + a - b) - fn(point - a + b) + fn(point - a - b)) / (4 * steps[i] * steps[j])


@pytest.mark.parametrize("right", ["x * g", "0 + g + x"])
def test_many_rows_give_least_squares(right):
    """With 2,000 rows priors hardly matter: estimates and standard errors of least squares, scales inside or not."""
    generator = np.random.default_rng(1)
    table = pd.DataFrame({"x": generator.normal(50, 9, 2000), "g": generator.choice(["a", "b"], 2000)})
    table["y"] = 1000 + 30 * table["x"] + 200 * (table["g"] == "b") + generator.normal(0, 300, 2000)
    model = sfvi.glmm(f"y ~ {right}", family="gaussian", silos=split(table, np.arange(2000) % 2))
    summary = model.fit(key=0, num_rounds=2500).summary()
    design = pd.concat([model.matrix("0"), model.matrix("1")]).to_numpy()
    y = pd.concat([table["y"][::2], table["y"][1::2]]).to_numpy()
    estimate, squares, *_ = np.linalg.lstsq(design, y, rcond=None)
    error = np.sqrt(squares[0] / (2000 - len(estimate)) * np.diag(np.linalg.inv(design.T @ design)))
    close(summary.coefficients, estimate, error, means=0.15, sds=0.06)
    np.testing.assert_allclose(summary.family.loc["sigma", "mean"], np.sqrt(squares[0] / 2000), rtol=0.01)
    assert list(summary.coefficients) == ["mean", "sd", "2.5%", "97.5%"]


# Simulated outcomes of all other families

TRUTH = {"Intercept": -0.4, "x": 0.06, "g[b]": 0.7, "g[c]": -0.5}


def simulated(family, rows=1200, seed=5):
    generator = np.random.default_rng(seed)
    table = pd.DataFrame({"x": generator.normal(5.0, 6.0, rows), "g": generator.choice(["a", "b", "c"], rows)})
    eta = TRUTH["Intercept"] + TRUTH["x"] * table["x"]
    eta += TRUTH["g[b]"] * (table["g"] == "b") + TRUTH["g[c]"] * (table["g"] == "c")
    table["n"], table["t"] = generator.integers(1, 12, rows), generator.uniform(0.5, 3.0, rows)
    if family == "bernoulli":
        table["y"] = np.where(generator.uniform(size=rows) < 1 / (1 + np.exp(-eta)), "yes", "no")
    elif family == "binomial":
        table["y"] = generator.binomial(table["n"], 1 / (1 + np.exp(-eta)))
    else:
        rate = table["t"] * np.exp(eta)
        table["y"] = generator.poisson(rate * (generator.gamma(3.0, 1 / 3, rows) if family != "poisson" else 1.0))
    return table


@pytest.mark.parametrize(
    ("family", "formula", "ratio"),
    [
        ("bernoulli", "y['yes'] ~ x + g", "odds ratio"),
        ("binomial", "prop(y, n) ~ x + g", "odds ratio"),
        ("poisson", "y ~ x + g + offset(log(t))", "rate ratio"),
        ("negativebinomial", "y ~ x + g + offset(np.log(t))", "rate ratio"),
    ],
)
def test_families_recover_what_was_simulated(family, formula, ratio):
    """Coefficients lie within 3.5 posterior sds of the truth, and the sds are small enough for that to tell."""
    table = simulated(family)
    fitted = sfvi.glmm(formula, family=family, silos=split(table, np.arange(len(table)) % 2)).fit(num_rounds=1500)
    summary = fitted.summary()
    found, truth = summary.coefficients, pd.Series(TRUTH)
    assert list(found.index) == list(truth.index)
    np.testing.assert_array_less(np.abs(found["mean"] - truth) / found["sd"], 3.5)
    np.testing.assert_array_less(found["sd"], [0.2, 0.02, 0.2, 0.2])
    np.testing.assert_allclose(found.loc["x", ratio], np.exp(found.loc["x", "mean"]), rtol=0.01)
    if family == "negativebinomial":
        concentration = summary.family.loc["concentration"]
        assert abs(concentration["mean"] - 3.0) < 3.5 * concentration["sd"] < 3.0


def test_slopes_of_groups_and_effects_of_silos():
    """Correlated slopes, centred inside and told at x = 0, and silos that differ: all is found within 3.5 sds."""
    generator, groups, rows = np.random.default_rng(7), 160, 8
    unit = np.repeat(np.arange(groups), rows)
    home, x = unit % 4, generator.normal(50.0, 10.0, groups * rows)
    effects = generator.multivariate_normal([0, 0], [[9.0, 0.48], [0.48, 0.04]], groups)[unit]
    level = np.array([-8.0, -3.0, 4.0, 7.0])
    y = 20 + 2 * (x - 50) + level[home] + effects[:, 0] + effects[:, 1] * (x - 50) + 3 * generator.normal(size=len(x))
    table = pd.DataFrame({"y": y, "x": x, "unit": unit})
    model = sfvi.glmm("y ~ x + (x | unit) + (1 | silo)", family="gaussian", silos=split(table, home))
    summary = model.fit(key=0, num_rounds=2500).summary(num_samples=5000)
    at_zero = np.sqrt(9.0 - 2 * 50 * 0.48 + 50**2 * 0.04)
    correlation = (0.48 - 50 * 0.04) / (0.2 * at_zero)
    expected = {"sd(1|unit)": at_zero, "sd(x|unit)": 0.2, "cor(1,x|unit)": correlation}
    found = summary.sds.loc[list(expected)]
    np.testing.assert_array_less(np.abs(found["mean"] - pd.Series(expected)) / found["sd"], 3.5)
    np.testing.assert_array_less(found["sd"], [2.0, 0.04, 0.03])
    assert list(summary.sds.index) == ["sd(1|unit)", "sd(x|unit)", "sd(1|silo)", "cor(1,x|unit)"]
    assert list(summary.silos.index) == [(name, "1") for name in "0123"]
    total = summary.silos["mean"].to_numpy() + summary.coefficients["mean"] @ [1.0, 50.0]
    np.testing.assert_allclose(total, 20 + level, atol=3.5 * 3.2 / np.sqrt(40))  # of means of 40 units
