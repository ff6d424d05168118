"""What a fit returns."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import sfvi
from sfvi import archive

COORDS = {"coefficient": ["age", "dose"], "patients": ["p1", "p2", "p3"]}


def population():
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    numpyro.deterministic("variance", sigma**2)
    return beta, sigma


def silo(globals_, data):
    beta, sigma = globals_
    shift = numpyro.param("shift", {"a": np.zeros(2), "b": np.zeros(())})
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("patients", data["y"].shape[0]):
        r = numpyro.sample("r", dist.Gamma(2.0, 2.0))
        numpyro.deterministic("effect", r * sigma)
        w = numpyro.sample("w", dist.Dirichlet(np.ones(3)))
        mean = level + data["x"] @ (beta + shift["a"]) + r + w[:, 0] + shift["b"]
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=data["y"])


def make_model():
    return sfvi.StructuredModel(population, silo, dims={"beta": ["coefficient"]}, coords=COORDS)


def silo_data(n, seed):
    generator = np.random.default_rng(seed)
    return {"x": generator.normal(size=(n, 2)), "y": generator.normal(size=n)}


SILOS = {"north/1": silo_data(3, 0), "south": silo_data(4, 1)}


@pytest.fixture(scope="module")
def fit():
    return sfvi.fit(make_model(), SILOS, key=0, num_rounds=200)


def test_draws_are_in_the_models_own_space(fit):
    draws = fit.posterior.sample(jax.random.key(0), 500)
    assert {name: d.shape for name, d in draws.items()} == {
        "beta": (500, 2),
        "sigma": (500,),
        "variance": (500,),
    }
    assert np.all(draws["sigma"] > 0)
    np.testing.assert_allclose(draws["variance"], draws["sigma"] ** 2, rtol=1e-12)


def test_silo_draws_are_joint_with_the_global_ones(fit):
    draws = fit.silo("south").sample(jax.random.key(0), 400)
    assert draws["r"].shape == (400, 4)
    assert draws["w"].shape == (400, 4, 3)
    np.testing.assert_allclose(draws["w"].sum(-1), 1.0, rtol=1e-9)
    np.testing.assert_allclose(draws["effect"], draws["r"] * draws["sigma"][:, None], rtol=1e-12)


def test_summary_is_labelled_and_agrees_with_the_draws(fit):
    table = fit.posterior.summary(num_samples=4000, quantiles=(0.1, 0.9), key=jax.random.key(1))
    assert list(table.index) == ["beta[age]", "beta[dose]", "sigma", "variance"]
    assert list(table.columns) == ["mean", "sd", "10%", "90%"]
    draws = fit.posterior.sample(jax.random.key(1), 4000)
    np.testing.assert_allclose(table.loc["sigma", "mean"], draws["sigma"].mean(), rtol=1e-12)
    np.testing.assert_allclose(table.loc["beta[dose]", "90%"], np.quantile(draws["beta"][:, 1], 0.9), rtol=1e-12)


def test_silo_summary_has_its_own_sites_only_and_labels_that_fit(fit):
    north = fit.silo("north/1").summary(num_samples=100)
    assert {"level", "r[p1]", "effect[p3]", "w[p2, 0]"} <= set(north.index)
    assert not any(name.startswith(("beta", "sigma")) for name in north.index)
    assert "r[3]" in fit.silo("south").summary(num_samples=100).index  # four patients, three labels: numbers


def test_arviz_has_dims_and_coords(fit):
    posterior = fit.posterior.to_arviz(num_samples=50).posterior
    assert posterior["beta"].dims == ("chain", "draw", "coefficient")
    assert list(posterior["coefficient"].values) == COORDS["coefficient"]
    local = fit.silo("north/1").to_arviz(num_samples=50).posterior
    assert local["r"].dims == ("chain", "draw", "patients")
    assert local["w"].dims == ("chain", "draw", "patients", "w_dim_1")
    assert local["effect"].dims == ("chain", "draw", "patients")
    assert list(local["patients"].values) == COORDS["patients"]


def test_keys_may_be_numbers_or_left_out(fit):
    assert np.array_equal(fit.posterior.sample()["sigma"], fit.posterior.sample(0, 1000)["sigma"])
    assert np.array_equal(fit.silo("south").sample(3, 5)["r"], fit.silo("south").sample(jax.random.key(3), 5)["r"])
    assert repr(fit.silo("south")) == "<SiloPosterior of 'south'>"
    assert repr(fit.posterior) == "<GlobalPosterior of beta, sigma: FullGaussian>"


def test_theta_is_returned_in_its_own_structure(fit):
    assert fit.theta["shift"]["a"].shape == (2,)
    assert fit.theta["shift"]["b"].shape == ()


def test_a_saved_fit_comes_back_whole(fit, tmp_path):
    fit.save(tmp_path / "fit")
    loaded = sfvi.load(tmp_path / "fit", make_model(), SILOS)
    key = jax.random.key(5)
    for one, two in [(fit.posterior, loaded.posterior), *((fit.silo(n), loaded.silo(n)) for n in fit.silo_names)]:
        before, after = one.sample(key, 20), two.sample(key, 20)
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
    np.testing.assert_array_equal(fit.elbo, loaded.elbo)
    np.testing.assert_array_equal(fit.theta["shift"]["a"], loaded.theta["shift"]["a"])


def test_saving_over_another_fit_leaves_none_of_its_silos(fit, tmp_path):
    fit.save(tmp_path)
    silos = tmp_path / "silos"
    (silos / "notes.npz").write_bytes(b"somebody else's")
    archive.write(silos / "mine.npz", {}, {"kind": "other"})
    (silos / "copy.npz").write_bytes((silos / "south.npz").read_bytes())
    fewer = sfvi.fit(make_model(), {"south": SILOS["south"], "west": silo_data(3, 5)}, key=0, num_rounds=2)
    fewer.save(tmp_path)
    assert {path.name for path in silos.iterdir()} == {"south.npz", "west.npz", "notes.npz", "mine.npz", "copy.npz"}
    part = sfvi.load(tmp_path, make_model(), {"west": silo_data(3, 5)})
    part.save(tmp_path)  # a silo that was not loaded still belongs to the fit
    assert sfvi.load(tmp_path, make_model(), {"south": SILOS["south"]}).silo_names == ["south"]


def test_the_global_file_holds_nothing_local(fit, tmp_path):
    fit.posterior.save(tmp_path / "global.npz")
    arrays, header = archive.read(tmp_path / "global.npz", kind="global posterior")
    assert set(arrays) == {
        "family.loc",
        "family.log_scale",
        "family.lower",
        *(f"{t}.{i}" for t in ("theta", "free_theta") for i in (0, 1)),
    }
    assert set(header) == {"format", "kind", "population", "family", "theta", "network", "bound"}
    assert arrays["family.loc"].shape == (3,)


def test_a_silo_file_holds_no_other_silo_and_no_data(fit, tmp_path):
    fit.silo("south").save(tmp_path / "south.npz")
    arrays, header = archive.read(tmp_path / "south.npz", kind="silo posterior")
    assert header["silo"] == "south"
    assert {a.shape[-1] for name, a in arrays.items() if name.startswith("local.0.")} == {4}
    stored = np.concatenate([a.ravel() for a in arrays.values()])
    assert not np.any(np.isin(SILOS["south"]["y"], stored))
    again = sfvi.SiloPosterior.load(tmp_path / "south.npz", make_model(), SILOS["south"])
    assert again.summary(num_samples=50).equals(fit.silo("south").summary(num_samples=50))


def test_files_of_another_model_or_shape_are_refused(fit, tmp_path):
    fit.save(tmp_path)

    def other():
        return numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1)), 1.0

    with pytest.raises(sfvi.ArchiveError, match="another population program"):
        sfvi.GlobalPosterior.load(tmp_path / "global.npz", sfvi.StructuredModel(other, silo))
    with pytest.raises(sfvi.ArchiveError, match="other data shapes"):
        sfvi.SiloPosterior.load(tmp_path / "silos" / "south.npz", make_model(), silo_data(5, 1))
    with pytest.raises(sfvi.ArchiveError, match="other data than those given for silo 'south'"):
        sfvi.load(tmp_path, make_model(), {"south": silo_data(4, 2)})
    with pytest.raises(sfvi.ArchiveError, match="takes the folder"):
        sfvi.load(tmp_path / "global.npz", make_model(), SILOS)
    with pytest.raises(sfvi.ArchiveError, match="expected a 'silo posterior'"):
        sfvi.SiloPosterior.load(tmp_path / "global.npz", make_model(), SILOS["south"])
    with pytest.raises(sfvi.OptionError, match="no silo 'west'"):
        fit.silo("west")
