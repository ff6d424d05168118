"""Checks that stay in a silo, and what ArviZ receives."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import sfvi
from sfvi import bounds, families
from sfvi.diagnostics import units
from sfvi.diagnostics.units import check_units
from sfvi.export import Group, inference_data


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 2.0))


def counts(mu, data):
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 0.5))
        with numpyro.handlers.mask(mask=data["seen"]):
            numpyro.sample("y", dist.Poisson(jnp.exp(b)), obs=data["y"])


def data(n=40, *, spread=0.5, seed=0):
    generator = np.random.default_rng(seed)
    y = generator.poisson(np.exp(1 + spread * generator.normal(size=n)))
    seen = np.arange(n) % 5 != 0
    return {"y": np.where(seen, y, 1000), "seen": seen}


def fitted(**options):
    model = sfvi.StructuredModel(population, counts, coords={"units": [f"u{i}" for i in range(40)]})
    return sfvi.fit(model, {"a": data(**options)}, key=0, num_rounds=1500)


@pytest.fixture(scope="module")
def fit():
    return fitted()


def test_a_good_silo_is_fine(fit):
    found = fit.silo("a").diagnose(num_samples=500)
    assert [check.name for check in found.checks] == ["units", "predictive"]
    assert found.trust == "fine", str(found)
    table = found["predictive"].table
    real = data()
    assert table.loc[("y", "largest"), "data"] == real["y"][real["seen"]].max()  # masked values do not count
    assert list(found["predictive"].disclosed()) == ["p"]
    assert len(found["units"].table) == 40


def test_units_are_looked_at_some_draws_at_a_time(fit, monkeypatch):
    whole = check_units(fit.silo("a")).table
    monkeypatch.setattr(units, "AT_A_TIME", 40 * 100)  # 6 times 86 draws of 40 units, of which 512 count
    parts = check_units(fit.silo("a")).table
    assert list(parts["unit"]) == list(whole["unit"]) == [f"u{i}" for i in range(40)]
    off = np.abs(parts["shift of mean, in sds"] - whole["shift of mean, in sds"])
    assert 0 < off.max() < 0.3  # other draws: 512 of them have a standard error of 0.04


def test_it_is_said_why_units_are_not_checked():
    def silo(mu, data):
        with numpyro.plate("units", 3):
            b = numpyro.sample("b", dist.Normal(mu, 0.5))
        with numpyro.plate("rows", 12, subsample_size=6):
            y, unit = (numpyro.subsample(data[name], event_dim=0) for name in ("y", "unit"))
            numpyro.sample("y", dist.Normal(b[unit], 1.0), obs=y)

    rows = {"y": np.arange(12.0), "unit": np.arange(12) % 3}
    options = sfvi.SFVI(bound=bounds.elbo())
    fit = sfvi.fit(sfvi.StructuredModel(population, silo), {"a": rows}, key=0, num_rounds=2, algorithm=options)
    (note,) = fit.silo("a").diagnose(num_samples=10).notes
    assert note.startswith("units: not checked, since plate 'rows' is subsampled")


def test_data_that_the_model_does_not_make():
    found = fitted(spread=2.5).silo("a").diagnose(num_samples=500)
    assert found["predictive"].trust == "do not trust", str(found)


def test_a_wrong_family_of_units_is_noticed():
    """Two latents of which the data tell only the sum: independent Gaussians are far too narrow."""

    def silo(mu, data):
        with numpyro.plate("units", data["y"].shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1.0).expand([2]).to_event(1))
            numpyro.sample("y", dist.Normal(b.sum(-1), 0.3), obs=data["y"])

    model, options = sfvi.StructuredModel(population, silo), {"bound": bounds.elbo(), "init_scale": 0.3}
    trust = {}
    for within in ("diagonal", "full"):
        algorithm = sfvi.SFVI(local_family=families.block(within=within), **options)
        fit = sfvi.fit(model, {"a": {"y": np.arange(5.0)}}, key=0, num_rounds=3000, algorithm=algorithm)
        trust[within] = fit.silo("a").diagnose(num_samples=100)["units"].trust
    assert trust == {"diagonal": "do not trust", "full": "fine"}


def test_the_predictive_check_is_seen_only_if_the_silo_agrees(fit):
    assert "predictive, a" not in str(fit.diagnose(num_samples=200))
    shown = fit.diagnose(num_samples=200, disclose=["a"])
    assert shown["predictive, a"].trust == "fine"


def test_without_the_silos_the_server_says_what_it_cannot_know(fit, tmp_path):
    fit.save(tmp_path)
    found = sfvi.load(tmp_path, fit.posterior.model, {}).diagnose()
    assert [check.name for check in found.checks] == ["convergence"]
    assert "the data of 'a' are not here" in str(found)


def test_groups_for_arviz(fit):
    exported = fit.silo("a").to_arviz(num_samples=300, key=1)
    assert set(exported.groups()) == {
        "posterior",
        "sample_stats",
        "posterior_predictive",
        "log_likelihood",
        "observed_data",
    }
    assert exported["observed_data"]["y"].dims == ("units",)
    assert list(exported["log_likelihood"]["y"].coords["units"].values[:2]) == ["u0", "u1"]
    b, y = exported["posterior"]["b"].values[0], data()
    expected = np.where(y["seen"], dist.Poisson(np.exp(b)).log_prob(y["y"]), 0.0)
    np.testing.assert_allclose(exported["log_likelihood"]["y"].values[0], expected, rtol=1e-6)
    mu = exported["posterior"]["mu"].values[0]
    lp = dist.Normal(0, 2).log_prob(mu) + dist.Normal(mu[:, None], 0.5).log_prob(b).sum(1) + expected.sum(1)
    np.testing.assert_allclose(exported["sample_stats"]["lp"].values[0], lp, rtol=1e-6)
    single = inference_data({"observed_data": Group({"y": np.array(2.0)}, {"y": []}, drawn=False)}, {})
    assert single["observed_data"]["y"].dims == ()
    only = fit.silo("a").to_arviz(num_samples=50, groups=["posterior"])
    assert only.groups() == ["posterior"]
    with pytest.raises(sfvi.OptionError, match="'prior'"):
        fit.silo("a").to_arviz(groups=["prior"])


@pytest.mark.filterwarnings("ignore")
def test_every_arviz_plot_works(fit):
    import arviz
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    here = fit.silo("a").to_arviz(num_samples=200)
    chosen = {"var_names": ["mu", "b"], "coords": {"units": ["u0"]}}
    mu, x = here["posterior"]["mu"].values.ravel(), np.arange(40)
    loo = arviz.loo(here, pointwise=True)
    plots = dict.fromkeys(("trace", "posterior", "forest", "pair", "parallel", "rank", "autocorr"), (here, chosen))
    plots |= {name: (here, {"var_names": ["mu"]}) for name in ("density", "violin", "ess", "mcse")}
    plots |= {name: (mu, {}) for name in ("ecdf", "dist", "dot", "kde")}
    plots |= {
        "ppc": (here, {}),
        "bpv": (here, {}),
        "loo_pit": (here, {"y": "y"}),
        "separation": (here, {"y": "y", "y_hat": "y"}),
        "ts": (here, {"y": "y"}),
        "lm": ("y", {"x": x, "idata": here}),
        "hdi": (x, {"y": here["posterior_predictive"]["y"]}),
        "khat": (loo, {}),
        "elpd": ({"one": loo, "another": loo}, {}),
        "compare": (arviz.compare({"one": here, "another": here}), {}),
        "dist_comparison": (with_prior(fit), {}),
        "bf": (with_prior(fit), {"var_name": "mu", "ref_val": 1.0}),
    }
    of_chains = {"energy"}  # of a sampler's moves: independent draws have none
    assert {f"plot_{name}" for name in plots.keys() | of_chains} == {n for n in dir(arviz) if n.startswith("plot_")}
    for name, (target, options) in plots.items():
        getattr(arviz, f"plot_{name}")(target, **options)
        assert any(axes.has_data() for axes in plt.gcf().axes), name
        plt.close("all")
    assert np.isfinite(arviz.waic(here).elpd_waic)
    assert len(arviz.summary(fit.posterior.to_arviz(num_samples=100))) == 1


def with_prior(fit):
    """What the server exports, and draws of the prior beside it."""
    found = fit.posterior.to_arviz(num_samples=200)
    prior = inference_data({"prior": Group({"mu": 2 * np.random.default_rng(0).normal(size=200)}, {"mu": []})}, {})
    found.extend(prior)
    return found
