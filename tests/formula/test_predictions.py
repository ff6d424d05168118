"""Predictions by formula: what the programs compute for known groups, the population's spread for new ones."""

import re
from html import unescape

import jax
import numpy as np
import pandas as pd
import pytest

import sfvi
from sfvi.errors import ArchiveError, DataError, OptionError
from sfvi.formula import GlmmFit
from sfvi.posterior.of_silo import _outputs

from .frames import mixed_table, split

TABLE = mixed_table(80).assign(id=[f"patient-{i}" for i in mixed_table(80)["id"]], ward=lambda t: t["k"])
SILOS = split(TABLE, np.arange(80) % 2)
DRAWS = 4000
FORMULA = "y ~ x * g + offset(w) + (1 + x | id) + (1 | ward:h) + (1 | silo)"


@pytest.fixture(scope="module")
def gaussian():
    """Far from fitted: predictions must be right whatever the posterior is."""
    return sfvi.glmm(FORMULA, family="gaussian", silos=SILOS).fit(key=0, num_rounds=20)


def of_program(fitted, silo, draws):
    """The linear predictor as the silo program computes it, from inner columns and inner sites."""
    table = fitted.design.read(SILOS[silo], silo=silo)
    data, design = fitted.design.arrays(table), fitted.design
    inner = draws["beta scaled"] @ data["x"].T
    for block in design.blocks:
        entry, effects = data[f"group {block.name}"], np.asarray(draws[f"b({block.name}) scaled"])
        effects = effects.reshape(len(effects), -1, len(block.effects))
        inner = inner + np.sum(effects[:, entry.get("row", np.zeros(len(table.frame), int))] * entry["z"], axis=-1)
    shift, scale = design.outcome_scale
    return inner * scale + shift + SILOS[silo]["w"].to_numpy()


def test_known_groups_have_their_own_effects(gaussian):
    draws = gaussian.fit.silo("1").sample(jax.random.split(jax.random.key(3))[0], 300)
    there = (SILOS["1"]["id"] != min(SILOS["1"]["id"])).to_numpy()  # others keep their effects
    rows = SILOS["1"].drop(columns="y")[there].iloc[::-1]
    found = gaussian.predict(rows, silo="1", key=3, num_samples=300, level=0.9)
    expected = of_program(gaussian, "1", draws)[:, there][:, ::-1]
    assert list(found) == ["mean", "sd", "5%", "95%"]
    assert found.index.equals(rows.index)
    np.testing.assert_allclose(found["mean"], expected.mean(0), rtol=1e-8)
    np.testing.assert_allclose(found["95%"], np.quantile(expected, 0.95, axis=0), rtol=1e-8)
    outcome = gaussian.predict(rows, silo="1", key=3, num_samples=DRAWS, kind="outcome")
    mean = gaussian.predict(rows, silo="1", key=3, num_samples=DRAWS)
    sigma2 = np.mean(np.asarray(gaussian.fit.posterior.sample(5, DRAWS)["sigma"]) ** 2)
    np.testing.assert_allclose(outcome["sd"], np.sqrt(mean["sd"] ** 2 + sigma2), rtol=0.1)  # 1 / sqrt(2 * 4000) = 1%


def test_new_groups_and_silos_have_the_spread_of_the_population(gaussian):
    """Variances add up: of the fixed part, and of effects around 0 with the population's covariance."""
    row = SILOS["1"].iloc[[0]]
    new = gaussian.predict(row.assign(id="unknown", ward=9), silo=None, num_samples=DRAWS, key=2)
    draws = gaussian.fit.posterior.sample(jax.random.split(jax.random.key(2))[0], DRAWS)
    fixed = draws["beta"] @ gaussian.design.predictors(gaussian.design.read(row, silo="1"))[1][0] + row["w"].item()
    a, b = draws["sd(1|id)"], draws["sd(x|id)"]
    correlated = 2 * row["x"].item() * draws["cor(1,x|id)"] * a * b
    spread = a**2 + correlated + (row["x"].item() * b) ** 2 + draws["sd(1|ward:h)"] ** 2 + draws["sd(1|silo)"] ** 2
    total = np.sqrt(np.var(fixed) + np.mean(spread))
    np.testing.assert_allclose(new["sd"], total, rtol=0.05)  # 5 standard errors of an sd
    np.testing.assert_allclose(new["mean"], np.mean(fixed), atol=4 * total / np.sqrt(DRAWS))
    same = pd.concat([row.assign(id="unknown")] * 2)
    assert np.ptp(gaussian.predict(same, silo="1")["mean"]) == 0  # rows of a new group share its effects
    apart = pd.concat([row.assign(id="unknown"), row.assign(id="another")])
    assert np.ptp(gaussian.predict(apart, silo="1")["mean"]) > 0


def test_ids_are_in_the_silo_and_nowhere_else(gaussian, tmp_path):
    rows = gaussian.fit.silo("0").summary(num_samples=10).index
    assert "b(id)[patient-0, 1]" in rows
    assert "b(id)[patient-0, x]" in rows
    assert any(row.startswith("b(ward:h)[1:p") for row in rows)
    posterior = gaussian.fit.silo("0").to_arviz(num_samples=2, groups=["posterior"]).posterior
    assert list(posterior["groups(id)"].values) == sorted(set(SILOS["0"]["id"]))
    assert "groups(id)" not in gaussian.fit.posterior.model.coords
    gaussian.save(tmp_path)
    assert all(b"patient-" not in path.read_bytes() for path in tmp_path.rglob("*.npz"))
    loaded = sfvi.load(tmp_path, gaussian.fit.posterior.model, {})
    with pytest.raises(OptionError, match="There is no silo '0' here"):
        GlmmFit(gaussian.design.agreement, loaded).predict(SILOS["0"], silo="0")


def test_a_fit_that_was_kept_predicts_the_same(gaussian, tmp_path):
    """Known groups included; another formula, or other priors, are refused."""
    gaussian.save(tmp_path)
    rows = SILOS["1"].iloc[:3]
    again = sfvi.glmm(FORMULA, family="gaussian", silos=SILOS).load(tmp_path)
    pd.testing.assert_frame_equal(again.predict(rows, silo="1"), gaussian.predict(rows, silo="1"))
    with pytest.raises(ArchiveError):
        sfvi.glmm("y ~ x + (1 | id)", family="gaussian", silos=SILOS).load(tmp_path)


def test_trials_are_for_outcomes_alone(float32):
    silos = {name: table.assign(all=10, n=table["n"]) for name, table in SILOS.items()}
    fitted = sfvi.glmm("prop(n, all) ~ g", family="binomial", silos=silos).fit(key=0, num_rounds=3)
    rows = pd.DataFrame({"g": ["a", "b"]})
    probability = fitted.predict(rows, silo=None, num_samples=DRAWS)["mean"]
    assert probability.between(0, 1).all()
    counts = fitted.predict(rows.assign(all=10), silo="0", num_samples=DRAWS, kind="outcome")
    np.testing.assert_allclose(counts["mean"], 10 * probability, rtol=0.1)
    with pytest.raises(DataError, match="no column 'all'"):
        fitted.predict(rows, silo=None, kind="outcome")
    with pytest.raises(DataError, match="have whole numbers of trials"):
        fitted.predict(rows.assign(all=0), silo=None, kind="outcome")


@pytest.mark.parametrize(
    ("rows", "options", "error", "said"),
    [
        (SILOS["0"], {"silo": "2"}, OptionError, "There is no silo '2' here; there are '0', '1'"),
        (SILOS["0"], {"kind": "probability"}, OptionError, "kind is 'probability'; choose 'mean' or 'outcome'"),
        (SILOS["0"], {"level": 95}, OptionError, "level is 95"),
        (SILOS["0"], {"num_samples": 1}, OptionError, "num_samples is 1"),
        (SILOS["0"].assign(g="z"), {}, DataError, "column 'g' has the level 'z', which was not agreed"),
        (SILOS["0"].assign(x=np.nan), {}, DataError, "predict: 40 of 40 rows have missing values"),
        (SILOS["0"].drop(columns="w"), {}, DataError, "no column 'w'"),
        ([1, 2], {}, DataError, "has a list; give a pandas DataFrame"),
    ],
)
def test_mistakes(gaussian, rows, options, error, said):
    with pytest.raises(error, match=said):
        gaussian.predict(rows, **{"silo": None, **options})


def test_a_silo_whose_groups_are_not_known(gaussian):
    unnamed = GlmmFit(gaussian.design.agreement, gaussian.fit)
    with pytest.raises(OptionError, match=r"from sfvi\.formula\.glmm_groups"):
        unnamed.predict(SILOS["0"], silo="0")
    groups = {"0": sfvi.formula.glmm_groups(SILOS["0"], gaussian.design.agreement)}
    named = GlmmFit(gaussian.design.agreement, gaussian.fit, groups=groups)
    pd.testing.assert_frame_equal(named.predict(SILOS["0"], silo="0"), gaussian.predict(SILOS["0"], silo="0"))


def test_a_new_patient_needs_no_id(gaussian):
    """Rows without a group, or with one that nobody has, are predicted alike; the second call compiles nothing."""
    rows = SILOS["1"].iloc[:2].drop(columns="y")
    unknown = gaussian.predict(rows.assign(id=["new 1", "new 2"]), silo="1")
    before = gaussian.fit.posterior._compiled[_outputs]._cached._cache_size()
    pd.testing.assert_frame_equal(gaussian.predict(rows.drop(columns="id"), silo="1"), unknown)
    one = gaussian.predict(rows.assign(id=[rows["id"].iloc[0], None]), silo="1")
    assert gaussian.fit.posterior._compiled[_outputs]._cached._cache_size() == before
    known = gaussian.predict(rows, silo="1")
    assert one["sd"].iloc[0] == known["sd"].iloc[0]
    assert one["sd"].iloc[1] == pytest.approx(unknown["sd"].iloc[1], rel=0.2)  # other draws of the same population
    with pytest.raises(DataError, match="has no column 'x'"):
        gaussian.predict(rows.drop(columns="x"), silo="1")
    with pytest.raises(OptionError, match=r"say to which silo the rows belong, silo=NAME \('0', '1'\)"):
        gaussian.predict(rows)


def test_reports_speak_the_language_of_the_formula(gaussian, tmp_path):
    """Coefficients once each, the outcome and the groups by their names, what was told before the fit."""
    gaussian.report(tmp_path / "server.html", diagnosis=False)
    gaussian.fit.silo("1").report(tmp_path / "silo.html", diagnosis=False)
    server, silo = (unescape((tmp_path / name).read_text("utf-8")) for name in ("server.html", "silo.html"))
    for text in (server, silo):
        assert not re.search(r"scaled<|scaled\[|Recoded|Rescaled|data\[|root\(", text)
    posterior = server[server.index('<section id="posterior"') :]
    posterior = posterior[posterior.index("<tbody>") : posterior.index("</tbody>")]
    assert re.findall(r"<code>([^<]*)</code>", posterior) == [
        *gaussian.design.labels,
        "sigma",
        *(f"sd({effect}|{block.name})" for block in gaussian.design.blocks for effect in block.effects),
        "cor(1,x|id)",
    ]
    assert "To agree on the formula" in server
    assert "sum of squared deviations of x and w; which levels of g" in server
    assert "patient-" not in server
    assert f"b(id)[{SILOS['1']['id'].iloc[0]}, x]" in silo
    assert gaussian.fit.path.columns[0] == ("mean", "Intercept")
