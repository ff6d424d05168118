"""What cannot be used is answered with one sentence that names it and says what to do."""

import sys

import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest

import sfvi
from sfvi.errors import DataError, OptionError
from sfvi.formula import Agreement, Summary, agree, glmm_summary, parsing

from .frames import mixed_table

TABLE = mixed_table(20)
SILOS = {"north": TABLE[:8], "south": TABLE[8:]}


def changed(**columns):
    """The silos, with columns of the southern one replaced."""
    return {"north": TABLE[:8], "south": TABLE[8:].assign(**columns)}


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        ("y ~ x +", "cannot be read"),
        ("y ~ x | id", "cannot be read from '|' on"),
        ("y ~ x %in% g", "cannot be read from '%' on"),
        ("y ~ (x || id)", r"write \(x \| group\)"),
        ("y ~ x**2", r"Use \{x\*\*2\}"),
        ("", "has no outcome"),
        ("~ x", "has no outcome"),
        ("y x", "has no outcome"),
        ("y ~ ", "nothing on its right side"),
        ("y ~ x * y", "The outcome 'y' is a predictor of itself"),
        ("g['a'] ~ x + (g | id)", "The outcome 'g' is a predictor of itself"),
        (3, "The formula is 3"),
        ("x + g", "has no outcome"),
        ("y ~ 0", "nothing on its right side"),
        ("y ~ x + 5", "adds the number 5"),
        ("y ~ bs(x, df=4)", "bs is computed from all rows, which no silo has"),
        ("y ~ I(log(x, w=1))", "gives log options"),
        ("y ~ poly(x)", "poly is computed from all rows, which no silo has"),
        ("y ~ I(x - np.mean(x))", "np.mean is not known to be computed row by row"),
        ("y ~ I(x - x.mean())", "x.mean is not known"),
        ("y ~ my_function(x)", "my_function is not known"),
        ("y ~ I(scale(x)**2)", "scale must stand by itself"),
        ("y ~ scale(x, w)", "takes one column"),
        ("y ~ B(g)", "B depends on the levels at hand"),
        ("y ~ prop(x, w)", "prop belongs to the left side"),
        ("y ~ x:offset(w)", "an offset stands alone"),
        ("y ~ offset()", r"offset\(\) takes one column or expression"),
        ("y ~ offset(x, w)", "takes one column or expression"),
        ("y ~ C(I(x))", "is not understood"),
        ("y ~ g['a']", "chooses a level of the outcome"),
        ("y ~ I((x + w) * 2) + I(x + w * 2)", "Two different terms are both written"),
        ("y ~ (1 | C(id))", "are computed; name a column behind the bar"),
        ("y ~ x + silo", "stands for the silo itself and only behind a bar"),
        ("y ~ (silo | id)", "stands for the silo itself and only behind a bar"),
    ],
)
def test_formulas(formula, said):
    with pytest.raises(OptionError, match=said):
        sfvi.glmm(formula, family="gaussian", silos=SILOS)


@pytest.mark.parametrize(
    ("formula", "family", "silos", "said"),
    [
        ("y ~ height", "gaussian", SILOS, "Silo 'north' has no column 'height'.*its columns are x, w"),
        ("y ~ x + (1 | ward)", "gaussian", SILOS, "no column 'ward'"),
        ("k ~ x", "bernoulli", SILOS, "Silo 'north': the outcome k must be 0 or 1"),
        ("y ~ x", "poisson", SILOS, "Silo 'north': the outcome y must be whole numbers, 0 or more"),
        ("n ~ x", "negativebinomial", changed(n=-1), "Silo 'south'.*12 of 12 rows are not, the first -1"),
        ("prop(k, n) ~ x", "binomial", changed(), "whole numbers of trials, 1 or more"),
        ("prop(n, k) ~ x", "binomial", SILOS, "successes, from 0 to the trials"),
        ("g ~ x", "bernoulli", SILOS, r"the outcome 'g' holds text.*g\['level'\]"),
        (
            "y ~ x",
            "gaussian",
            changed(x="tall"),
            "Column 'x' is numeric in silo 'north' and categorical in silo 'south'",
        ),
        ("y ~ x", "gaussian", changed(x=pd.Timestamp("2020-01-01")), "Silo 'south': column 'x' is of type datetime"),
        (
            "y ~ x",
            "gaussian",
            changed(x=np.nan),
            "Silo 'south' has missing values in 12 of 12 rows .*'x' 12.*--missing drop",
        ),
        ("y ~ log(x)", "gaussian", changed(x=-1.0), r"Silo 'south': the term log\(x\) is not finite in 12 of 12 rows"),
        ("y ~ I(g)", "gaussian", SILOS, r"the term I\(g\) does not give numbers"),
        ("y ~ x", "gaussian", {"north": TABLE, "south": TABLE[:0]}, "Silo 'south' is empty: its table has no rows"),
        ("y ~ x", "gaussian", {"north": TABLE.to_dict()}, "Silo 'north' has a dict; give a pandas DataFrame"),
        ("y ~ x", "gaussian", {}, "at least one silo"),
        ("y ~ x", "gaussian", {1: TABLE}, "A silo is named 1; names must be non-empty strings"),
        ("y ~ x", "gaussian", [TABLE], "silos must be a mapping"),
        ("y ~ (1 | silo)", "gaussian", changed(silo="s"), "Silo 'south' has a column named 'silo'.*rename the column"),
        ("y ~ g", "gaussian", {"north": TABLE.assign(g="a")}, "'g' has the single level 'a' in all silos"),
        ("y ~ x", "gaussian", {"north": TABLE.assign(x=1)}, "x is the same number in all rows of all silos"),
        ("y ~ x", "gaussian", {"north": TABLE.assign(y=1)}, "outcome is the same number in all rows"),
        ("y ~ C(m)", "gaussian", {"north": TABLE.assign(m=pd.Categorical([1, "a"] * 10))}, "mix numbers and text"),
        ("y ~ x", "gaussian", {"north": pd.concat([TABLE, TABLE["x"]], axis=1)}, "several columns named 'x'"),
    ],
)
def test_data(formula, family, silos, said):
    with pytest.raises(DataError, match=said):
        sfvi.glmm(formula, family=family, silos=silos)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"family": "gamma"}, "family is 'gamma'; choose one of 'gaussian', 'bernoulli'"),
        ({"family": "binomial"}, r"takes prop\(successes, trials\)"),
        ({"missing": "impute"}, "missing is 'impute'; choose 'error' or 'drop'"),
        ({"standardize": "yes"}, "standardize is 'yes'"),
        ({"priors": {"smoke": dist.Normal(0, 1)}}, r"no 'smoke' to have a prior; there are Intercept, x, sd\(1\|id\)"),
        ({"priors": {"x": dist.HalfNormal(1)}}, "prior of x is HalfNormal.*whole real line"),
        ({"priors": {"x": 1.0}}, "give a NumPyro distribution of a single number"),
        ({"priors": {"x": dist.Normal(0, np.ones(2))}}, "distribution of a single number"),
        ({"priors": {"sd(1|id)": dist.Normal(0, 1)}}, "one of positive numbers"),
        ({"priors": {"cor(silo)": 0}}, r"prior of cor\(silo\) is 0; give the concentration"),
        ({"priors": [1]}, "give a mapping from name to prior"),
    ],
)
def test_options(options, said):
    options = {"family": "gaussian", "silos": SILOS} | options
    with pytest.raises(OptionError, match=said):
        sfvi.glmm("y ~ x + (1 | id) + (x | silo)", **options)


def test_a_level_of_a_numeric_outcome():
    with pytest.raises(OptionError, match="the column is numeric; write k"):
        sfvi.glmm("k['a'] ~ x", family="bernoulli", silos=SILOS)


@pytest.mark.parametrize("term", ["T(g, 'typo')", "C(g, Treatment('typo'))", "S(g, 'typo')", "T(k, 9)"])
def test_a_reference_that_no_silo_has(term):
    with pytest.raises(
        OptionError, match=r"no silo has the level ('typo'|9); column '(g|k)' has ('a', 'b', 'c'|1, 2, 3)"
    ):
        sfvi.glmm(f"y ~ {term}", family="gaussian", silos=SILOS)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "3", None, '{"levels": 1}', '{"levels": {}, "orders": {}}'])
def test_texts_that_are_none_of_ours(text):
    for kind, said in ((Summary, "text of a Summary"), (Agreement, "text of an Agreement")):
        with pytest.raises(DataError, match=f"This is not the {said}.*send what to_json made"):
            kind.from_json(text)


def test_silos_that_summarized_something_else():
    one = glmm_summary(TABLE, "y ~ x", family="gaussian")
    other = glmm_summary(TABLE, "y ~ w", family="gaussian")
    with pytest.raises(DataError, match=r"Silo 'a' summarized 'y ~ x'.*silo 'b' 'y ~ w'"):
        agree({"a": one, "b": other})
    with pytest.raises(DataError, match="There are no silos"):
        agree({})
    ordered, reversed_ = (
        TABLE.assign(g=pd.Categorical(TABLE["g"], categories=list(levels), ordered=True)) for levels in ("abc", "cba")
    )
    told = {name: glmm_summary(table, "y ~ g", family="gaussian") for name, table in (("a", ordered), ("b", reversed_))}
    with pytest.raises(DataError, match=r"'g' has ordered categories .* order them alike"):
        agree(told)


def test_a_level_that_was_not_agreed():
    agreement = agree({"a": glmm_summary(TABLE[TABLE["g"] != "c"], "y ~ g", family="gaussian")})
    with pytest.raises(DataError, match="Silo 'late': column 'g' has the level 'c', which was not agreed"):
        sfvi.formula.glmm_arrays(TABLE, agreement, silo="late")
    with pytest.raises(DataError, match="Silo 'late': column 'g' is numeric, but categorical was agreed"):
        sfvi.formula.glmm_arrays(TABLE.assign(g=1), agreement, silo="late")


def test_missing_values_are_dropped_and_told():
    silos = {"north": TABLE[:8], "south": TABLE[8:].assign(g=[None] * 3 + ["a"] * 9, unused=np.nan)}
    silos["south"].loc[TABLE.index[12], "x"] = np.nan
    with pytest.raises(DataError, match=r"Silo 'south' has missing values in 4 of 12 rows \(by column: 'x' 1, 'g' 3\)"):
        sfvi.glmm("y ~ x + g", family="gaussian", silos=silos)
    model = sfvi.glmm("y ~ x + g", family="gaussian", silos=silos, missing="drop")
    assert model.dropped == {"north": 0, "south": 4}
    assert len(model.silos["south"]["y"]) == 8
    assert "rows left out because of missing values: 4 in south" in repr(model)
    with pytest.raises(DataError, match="Silo 'south' is empty: every row has missing values"):
        sfvi.glmm("y ~ unused", family="gaussian", silos={"south": silos["south"]}, missing="drop")


def test_without_the_package(monkeypatch):
    parsing._formulae.cache_clear()
    monkeypatch.setitem(sys.modules, "formulae", None)
    with pytest.raises(OptionError, match=r"pip install 'sfvi\[formula\]'"):
        sfvi.glmm("y ~ x", family="gaussian", silos=SILOS)
    parsing._formulae.cache_clear()


def test_a_level_of_the_outcome_must_occur_somewhere():
    silos = {name: part.assign(answer=np.where(np.arange(len(part)) % 2, "yes", "no")) for name, part in SILOS.items()}
    assert sum(
        data["y"].sum() for data in sfvi.glmm("answer['yes'] ~ x", family="bernoulli", silos=silos).silos.values()
    )
    with pytest.raises(DataError, match="chosen level of the outcome occurs in no silo"):
        sfvi.glmm("answer['Yes'] ~ x", family="bernoulli", silos=silos)
    with pytest.raises(OptionError, match="a level of the outcome is for 'bernoulli'"):
        sfvi.glmm("answer['yes'] ~ x", family="gaussian", silos=silos)


def test_values_do_not_leave_as_levels():
    """Numbers read as text, and texts that nearly every row has for itself."""
    numbers = changed(z=[f"{value:.1f}".replace(".", ",") for value in np.linspace(1, 9, 12)])
    with pytest.raises(DataError, match="'z' holds numbers as text"):
        glmm_summary(numbers["south"], "y ~ z", family="gaussian")
    many = pd.concat([TABLE] * 4, ignore_index=True)
    many = many.assign(z=[f"name {number}" for number in range(len(many))])
    with pytest.raises(DataError, match="80 levels in 80 rows"):
        glmm_summary(many, "y ~ z", family="gaussian")
