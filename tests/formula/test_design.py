"""Design matrices: those that formulae makes of pooled rows, however the rows are split."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from formulae import design_matrices

import sfvi
from sfvi.formula import Agreement, Summary, agree, glmm_arrays, glmm_summary
from sfvi.formula.design import Design

from .frames import mixed_table, split

TABLE = mixed_table()
FUNCTIONS = {"np": np, "log": np.log, "sqrt": np.sqrt}
SHARED = [  # their terms share variables, which formulae codes right and labels wrongly
    "y ~ g/x",
    "y ~ h/g",
    "y ~ (g + h + x)**2 - x",
    "y ~ h*g*x - h",
    "y ~ 0 + g*h*x",
]
FORMULAS = [
    "y ~ 1",
    "y ~ x * g",
    "y ~ x * w * g",
    "y ~ 0 + g + x:g",
    "y ~ -1 + x + {w + 1}",
    "y ~ g:h + x",
    "y ~ x + h:g:x",
    "y ~ x:w + I(x**2) + np.log(w) + sqrt(t)",
    "y ~ scale(x) * center(w) + standardize(log(w))",
    "y ~ T(g, 'b') * S(h) + x",
    "y ~ C(k, Treatment(2)) + w",
    "y ~ I(g == 'a') * x",
    "y ~ (x + w + h)**2",
    "y ~ x + offset(log(t)) + (x | id)",
    *SHARED,
]


def agreed(parts, formula, **options):
    """The agreement, sent as text."""
    told = {
        name: Summary.from_json(glmm_summary(part, formula, family="gaussian").to_json())
        for name, part in parts.items()
    }
    return Agreement.from_json(agree(told, **options).to_json())


def pooled(formula):
    found = design_matrices(formula, TABLE, extra_namespace=FUNCTIONS).common
    if formula in SHARED:
        return pd.DataFrame(found.design_matrix)
    matrix = found.as_dataframe()
    return matrix[[column for column in matrix if not column.startswith("offset")]]


@pytest.mark.parametrize("formula", FORMULAS)
@hypothesis.settings(max_examples=8)
@hypothesis.example([ord(level) for level in TABLE["g"]])  # every silo lacks two levels of g
@hypothesis.example([ord(level) for level in TABLE["h"]])
@hypothesis.given(st.lists(st.integers(0, 3), min_size=len(TABLE), max_size=len(TABLE)))
def test_any_split_gives_the_rows_of_the_pooled_matrix(formula, assigned):
    """Levels that a silo lacks, columns constant there, silos of one row: none of it changes a column."""
    assigned = np.array(assigned)
    parts = split(TABLE, assigned)
    design = Design(agreed(parts, formula))
    found = pd.concat(
        [design.matrix(design.read(part, silo=name)).set_index(part.index) for name, part in parts.items()]
    )
    expected = pooled(formula)
    assert formula in SHARED or list(found) == list(expected)
    assert len(set(found)) == found.shape[1]
    np.testing.assert_allclose(found.sort_index().to_numpy(), expected.to_numpy(float), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("formula", FORMULAS)
def test_recoded_columns_are_the_same_model(formula):
    """The inner columns span what the written ones do, and coefficients are led back exactly."""
    for standardize in (True, False):
        design = Design(agreed({"all": TABLE}, formula, standardize=standardize))
        written, matrix = pooled(formula).to_numpy(float), design.recoding.matrix
        inner = glmm_arrays(TABLE, design.agreement)["x"]
        np.testing.assert_allclose(inner, written @ matrix, rtol=1e-8, atol=1e-8)
        assert np.linalg.matrix_rank(matrix) == len(matrix)
        assert standardize or np.array_equal(matrix, np.eye(len(matrix)))


def test_numeric_columns_are_centred_and_scaled_inside():
    design = Design(agreed({"all": TABLE}, "y ~ x * w + g"))
    inner = pd.DataFrame(glmm_arrays(TABLE, design.agreement)["x"], columns=design.labels)
    z = {name: (TABLE[name] - TABLE[name].mean()) / TABLE[name].std(ddof=0) for name in ("x", "w")}
    np.testing.assert_allclose(inner["x"], z["x"])
    np.testing.assert_allclose(inner["x:w"], z["x"] * z["w"])
    np.testing.assert_array_equal(inner["g[b]"], TABLE["g"] == "b")
    design = Design(agreed({"all": TABLE}, "y ~ 0 + g + x"))  # the levels of g add up to an intercept
    inner = pd.DataFrame(glmm_arrays(TABLE, design.agreement)["x"], columns=design.labels)
    np.testing.assert_allclose(inner["x"], z["x"])
    design = Design(agreed({"all": TABLE}, "y ~ x + x:g"))  # without g, the product with x - mean is not in the span
    inner = pd.DataFrame(glmm_arrays(TABLE, design.agreement)["x"], columns=design.labels)
    np.testing.assert_allclose(inner["x:g[b]"], TABLE["x"] / TABLE["x"].std(ddof=0) * (TABLE["g"] == "b"))


def test_merged_moments_are_the_pooled_ones():
    parts = split(TABLE, np.arange(len(TABLE)) % 7)
    agreement = agreed(parts, "y ~ x + np.log(w)")
    for name, column in {"x": TABLE["x"], "np.log(w)": np.log(TABLE["w"])}.items():
        moments = agreement.moments[name]
        np.testing.assert_allclose((moments.mean, moments.sd), (column.mean(), column.std(ddof=0)), rtol=1e-12)
    np.testing.assert_allclose(agreement.outcome.sd, TABLE["y"].std(ddof=0), rtol=1e-12)
    assert agreement.rows == len(TABLE)


def test_a_summary_holds_what_it_is_said_to_and_nothing_of_groups():
    summary = glmm_summary(TABLE, "n ~ x + g + offset(log(t)) + (1 | id) + (1 | silo)", family="poisson")
    assert summary.rows == len(TABLE)
    assert set(summary.moments) == {"x", "log(t)"}
    assert summary.levels == {"g": ("a", "b", "c")}
    assert set(summary.kinds) == {"n", "x", "g", "t"}
    assert summary.outcome.count == len(TABLE)
    binary = glmm_summary(TABLE.assign(y=TABLE["n"] > 2), "y ~ x", family="bernoulli")
    assert binary.outcome is None


def test_levels_sorted_ordered_and_whole():
    first = pd.DataFrame({"y": [1.0, 2.0], "g": ["b", "c"], "k": [1.0, 3.0]})
    second = pd.DataFrame({"y": [3.0, 4.0], "g": ["a", "a"], "k": [2, 1]})
    model = sfvi.glmm("y ~ g + C(k)", family="gaussian", silos={"one": first, "two": second})
    assert list(model.matrix("one")) == ["Intercept", "g[b]", "g[c]", "C(k)[2]", "C(k)[3]"]
    np.testing.assert_array_equal(model.matrix("one").to_numpy(), [[1, 1, 0, 0, 0], [1, 0, 1, 0, 1]])
    np.testing.assert_array_equal(model.matrix("two").to_numpy(), [[1, 0, 0, 1, 0], [1, 0, 0, 0, 0]])
    order = pd.CategoricalDtype(["low", "mid", "high"], ordered=True)
    third, fourth = (
        pd.DataFrame({"y": [1.0, 2.0], "g": pd.Categorical(levels, dtype=order)})
        for levels in (["low", "high"], ["low", "low"])
    )
    model = sfvi.glmm("y ~ g", family="gaussian", silos={"one": third, "two": fourth})
    assert list(model.matrix("two")) == ["Intercept", "g[mid]", "g[high]"]
    np.testing.assert_array_equal(model.matrix("one").to_numpy(), [[1, 0, 0], [1, 0, 1]])


def test_effects_of_groups():
    """Which row belongs to whom, and what has an effect there; ids in two silos are two groups."""
    table = pd.DataFrame({"y": np.arange(6.0), "x": np.arange(6.0), "g": list("abcabc"), "id": [7, 5, 7, 5, 9, 9]})
    silos = {"one": table, "two": table.assign(x=table["x"] + 1)}
    model = sfvi.glmm("y ~ x + (x | silo/id) + (0 + g | silo)", family="gaussian", silos=silos, standardize=False)
    assert [(block.name, block.effects) for block in model.design.blocks] == [
        ("silo", ["1", "x", "g[b]", "g[c]"]),
        ("id", ["1", "x"]),
    ]
    assert model.groups == {"one": {"id": [5, 7, 9]}, "two": {"id": [5, 7, 9]}}
    data = model.silos["two"]
    np.testing.assert_array_equal(data["group id"]["row"], [1, 0, 1, 0, 2, 2])
    np.testing.assert_array_equal(data["group id"]["z"], np.stack([np.ones(6), silos["two"]["x"]], axis=1))
    both = sfvi.glmm("y ~ (1 | id:g)", family="gaussian", silos={"one": table})
    assert both.groups["one"]["id:g"] == [(5, "a"), (5, "b"), (7, "a"), (7, "c"), (9, "b"), (9, "c")]


def test_rows_find_their_group():
    """With one factor, and effects of the silo beside it, every row has an owner: the bound is the enhanced one."""
    parts = split(TABLE, np.arange(len(TABLE)) % 2)
    for formula, owned in {
        "n ~ x + (x | id) + (1 | silo)": True,
        "n ~ x + (1 | id) + (1 | k)": False,
    }.items():
        model = sfvi.glmm(formula, family="poisson", silos=parts)
        silo = model.model.silo_data("0", model.silos["0"])
        assert bool(silo.owners) == owned
        if owned:
            np.testing.assert_array_equal(silo.owners["y"], model.silos["0"]["group id"]["row"])


def test_the_three_steps_are_those_of_glmm():
    parts = split(TABLE, np.arange(len(TABLE)) % 3)
    formula = "y ~ x * g + offset(w) + (x | id) + (1 | silo)"
    model = sfvi.glmm(formula, family="gaussian", silos=parts)
    agreement = agreed(parts, formula)
    for name, part in parts.items():
        alone = glmm_arrays(part, agreement)
        assert alone.keys() == model.silos[name].keys()
        for key in ("x", "y"):
            np.testing.assert_array_equal(alone[key], model.silos[name][key])
