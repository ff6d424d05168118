"""Centred, non-centred and between: the same model and results, measured by other numbers inside q."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.special import logit
from numpyro.contrib.control_flow import scan

import sfvi
from sfvi.families import Local
from sfvi.model.centring import START

from ..helpers import assert_trees_close, bind, pooled_log_density, run_batched, run_one_by_one
from .test_programs import point

KEY = jax.random.key(2)
PLAIN = sfvi.SFVI(bound=sfvi.bounds.elbo())  # quick to compile; the default bound has a test of its own


def population():
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    log_tau = numpyro.sample("log_tau", dist.Normal(0.0, 1.0))
    return mu, jnp.exp(log_tau)


def silo(globals_, data):
    mu, tau = globals_
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(b[:, None], 0.5).to_event(1), obs=data["y"])


def by_hand(globals_, data):
    mu, tau = globals_
    with numpyro.plate("units", data["y"].shape[0]):
        raw = numpyro.sample("raw", dist.Normal(0.0, 1.0))
        b = numpyro.deterministic("b", mu + tau * raw)
        numpyro.sample("y", dist.Normal(b[:, None], 0.5).to_event(1), obs=data["y"])


def with_level(globals_, data):
    mu, tau = globals_
    level = numpyro.sample("level", dist.Normal(mu, tau))
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(level, tau))
        numpyro.sample("y", dist.Normal(b[:, None], 0.5).to_event(1), obs=data["y"])


def simulate(units, rows=3, seed=0, noise=0.5):
    rng = np.random.default_rng(seed)
    b = 0.7 + 0.8 * rng.normal(size=(units, 1))
    return {"y": b + noise * rng.normal(size=(units, rows))}


def model(centring, program=silo):
    return sfvi.StructuredModel(population, program, centring=centring)


# The density


def everything(globals_, data):
    """One site of each kind that has a location and a scale, and one that has not."""
    mu, tau = globals_
    level = numpyro.sample("level", dist.Cauchy(mu, tau))
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu + level, tau))
        t = numpyro.sample("t", dist.StudentT(5.0, b, 2 * tau))
        v = numpyro.sample("v", dist.Laplace(mu * jnp.arange(2), tau * jnp.array([1.0, 0.5])).to_event(1))
        w = numpyro.sample("w", dist.Logistic(0, tau).expand([3]).to_event(1))
        g = numpyro.sample("g", dist.Gumbel(b, 3))
        s = numpyro.sample("s", dist.SoftLaplace(mu, tau))
        r = numpyro.sample("r", dist.Gamma(2.0, tau))
        numpyro.sample("y", dist.Normal(b + t + v.sum(-1) + w.sum(-1) + g + s + r, 1.0), obs=data["y"])


def scales(tau):
    """Of every element of every site of `everything`."""
    return {
        "level": tau,
        "b": tau,
        "t": 2 * tau,
        "v": tau * jnp.array([1.0, 0.5]),
        "w": tau * jnp.ones(3),
        "g": 3.0,
        "s": tau,
    }


def check_density(centring, numbers, theta):
    data = {"y": np.linspace(-1.0, 2.0, 4)}
    built = model(centring, everything)
    one = built.silo_data("a", data)
    z, local = jnp.asarray([0.4, -0.6]), point(one, 3)
    ours = one.program.log_prob(z, local, theta, one, {})
    values = one.program.outputs(z, local, theta, one)
    assert set(values) == {"level", "b", "t", "v", "w", "g", "s", "r"}
    everywhere = {"mu": z[0], "log_tau": z[1], **values}
    written = pooled_log_density(population, everything, {}, everywhere, data) - built.population.log_prob(z, {})
    jacobian = jnp.sum(jnp.log(values["r"]))
    for site, scale in scales(jnp.exp(z[1])).items():
        jacobian += jnp.sum((1 - numbers[site]) * jnp.log(scale) * jnp.ones_like(values[site]))
    np.testing.assert_allclose(ours, written + jacobian, rtol=1e-12)
    return z, one.program.layout.split(local), values


@pytest.mark.parametrize("number", [0.0, 0.3, 1.0])
def test_density_is_that_as_written_after_the_change_of_variables(number):
    numbers = dict.fromkeys(scales(1.0), number)
    z, free, values = check_density(numbers, numbers, {})
    mu, tau = z[0], jnp.exp(z[1])
    location = mu + values["level"]
    expected = location + tau ** (1 - number) * (free["b"] - number * location)
    np.testing.assert_allclose(values["b"], expected, rtol=1e-12)


def test_density_with_learned_numbers():
    """Elements of an event with parameters of their own have numbers of their own; expanded ones share."""
    numbers = {site: jnp.asarray(0.1 + 0.1 * i) for i, site in enumerate(scales(1.0))} | {"v": jnp.array([0.2, 0.9])}
    theta = {f"{site}_centered": logit(number) for site, number in numbers.items()}
    built = model("learned", everything)
    start = built.initial_theta(KEY, {"a": built.silo_data("a", {"y": np.ones(4)})})
    assert {name: leaf.shape for name, leaf in start.items()} == {name: leaf.shape for name, leaf in theta.items()}
    check_density("learned", numbers, theta)


def test_words_are_numbers():
    at = {}
    for centring in ("as_written", {"b": 1}, "non_centred", {"b": 0}, {"b": "non_centred"}):
        one = model(centring).silo_data("a", simulate(4))
        at[str(centring)] = float(one.program.log_prob(jnp.asarray([0.3, 0.5]), point(one), {}, one, {}))
    written, one, centred, zero, single = at.values()
    assert written == one != centred == zero == single


def test_non_centred_is_the_program_written_so():
    silos = {"a": simulate(5), "b": simulate(8, seed=1)}
    options = {"key": 0, "num_rounds": 200, "algorithm": PLAIN}
    ours, hand = (sfvi.fit(m, silos, **options) for m in (model("non_centred"), model("as_written", by_hand)))
    np.testing.assert_allclose(ours.elbo, hand.elbo, rtol=1e-10)
    assert_trees_close(ours.posterior.family, hand.posterior.family)
    assert_trees_close(ours.silo("b").family, hand.silo("b").family)
    np.testing.assert_allclose(ours.silo("b").sample(1, 50)["b"], hand.silo("b").sample(1, 50)["b"], rtol=1e-9)


# How silos are computed


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "stacked"])
def test_any_split_gives_the_same_trajectory(merge):
    whole = simulate(12)

    def trajectory(sizes):
        ends = np.cumsum(sizes)[:-1]
        silos = {f"s{j}": {"y": part} for j, part in enumerate(np.split(whole["y"], ends))}
        ids = {f"s{j}": part for j, part in enumerate(np.split(np.arange(12), ends))}
        built = model("learned")
        algorithm, data, theta = bind(built, silos, unit_ids=ids, optimizer=optax.adam(0.02))
        server, families, batches = run_batched(built, algorithm, data, theta, KEY, 300, merge=merge)
        assert len(batches) == 1 or not merge
        blocks = [families[name].units["units"] for name in silos]
        return server.shared, jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=-1), *blocks)

    reference = trajectory([12])
    assert abs(reference[0].theta["b_centered"] - logit(START)) > 0.1  # it was moved
    assert_trees_close(trajectory([4, 1, 3, 4]), reference, rtol=0, atol=1e-10)


@pytest.mark.parametrize("program", [silo, with_level], ids=["units", "units and silo"])
def test_silos_of_different_size_together_as_one_by_one(program):
    silos = {name: simulate(n, seed=n) for name, n in {"a": 6, "b": 7, "c": 6}.items()}
    built = model("learned", program)
    algorithm, data, theta = bind(built, silos, optimizer=optax.adam(0.02))
    server, families = run_one_by_one(algorithm, data, theta, KEY, 30)
    for merge in (True, False):
        together, batched, batches = run_batched(built, algorithm, data, theta, KEY, 30, merge=merge)
        assert len(batches) == 1
        assert_trees_close(together.shared, server.shared)
        assert_trees_close(batched, families)


def test_minibatches():
    """Over all pairs of units the average is the whole, Jacobians included; and a fit with them runs."""

    def program(globals_, data):
        mu, tau = globals_
        with numpyro.plate("units", data["y"].shape[0], subsample_size=2) as chosen:
            b = numpyro.sample("b", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(b, 0.5), obs=data["y"][chosen])

    built = model({"b": 0.3}, program)
    one = built.silo_data("a", {"y": np.arange(4.0)})
    z, local = jnp.asarray([0.3, -0.4]), point(one)
    values = []
    for pair in [(i, j) for i in range(4) for j in range(i)]:
        chosen = jnp.asarray(pair)
        drawn = Local(None, {"units": local.units["units"][:, chosen]})
        values.append(one.program.log_prob(z, drawn, {}, one, {"units": chosen}))
    mu, tau = 0.3, jnp.exp(-0.4)
    b = mu + tau**0.7 * (local.units["units"][0] - 0.3 * mu)
    whole = dist.Normal(mu, tau).log_prob(b) + 0.7 * jnp.log(tau) + dist.Normal(b, 0.5).log_prob(np.arange(4.0))
    np.testing.assert_allclose(np.mean(values), whole.sum(), rtol=1e-12)

    silos = {"a": {"y": np.arange(5.0)}, "b": {"y": np.arange(7.0)}, "c": {"y": np.arange(1.0)}}
    fit = sfvi.fit(model("learned", program), silos, key=0, num_rounds=50, algorithm=PLAIN)
    assert fit.silo("b").sample(0, 3)["b"].shape == (3, 7)
    assert fit.silo("c").sample(0, 3)["b"].shape == (3, 1)


def test_units_separate():
    """The locally enhanced bound, which needs that, gets the same sum unit by unit."""
    built = model("learned", with_level)
    one = built.silo_data("a", simulate(4))
    theta = {"level_centered": jnp.asarray(0.4), "b_centered": jnp.asarray(-0.7)}
    assert one.program.separates(theta, one)
    z, local = jnp.asarray([0.3, 0.5]), point(one)
    rest, units = one.program.unit_log_probs(z, local, theta, one, {})
    expected = one.program.log_prob(z, local, theta, one, {})
    np.testing.assert_allclose(rest + units["units"].sum(), expected, rtol=1e-12)
    algorithm = sfvi.SFVI(bound=sfvi.bounds.locally_enhanced(3))
    fit = sfvi.fit(built, {"a": simulate(4), "b": simulate(4)}, key=0, num_rounds=100, algorithm=algorithm)
    assert np.isfinite(fit.elbo).all()
    assert abs(fit.theta["b_centered"] - START) > 1e-3


# What "auto" takes


def test_auto_takes_sites_that_depend_on_latents_or_theta():
    def program(globals_, data):
        mu, tau = globals_
        shift = numpyro.param("shift", 0.3)
        with numpyro.plate("units", data["y"].shape[0]):
            location = numpyro.sample("location", dist.Normal(mu, 1.0))
            numpyro.sample("scale", dist.Normal(0.0, tau))
            numpyro.sample("theta", dist.Normal(shift, 1.0))
            numpyro.sample("local", dist.StudentT(3.0, jnp.sin(location), 1.0).expand([len(data["y"])]))
            numpyro.sample("vector", dist.Normal(jnp.zeros(2), tau).to_event(1))
            numpyro.sample("constant", dist.Normal(0.0, 5.0))
            numpyro.sample("by_data", dist.Normal(data["y"], 1.0))
            numpyro.sample("shape_only", dist.Normal(jnp.zeros_like(location), 1.0))
            numpyro.sample("degrees", dist.StudentT(tau, 0.0, 1.0))
            numpyro.sample("positive", dist.LogNormal(mu, tau))
            numpyro.sample("full", dist.MultivariateNormal(mu * jnp.ones(2), jnp.eye(2)))
            numpyro.sample("y", dist.Normal(location, tau), obs=data["y"])
            with numpyro.handlers.scale(scale=0.5):
                numpyro.sample("scaled", dist.Normal(mu, tau))
        with numpyro.handlers.scope(prefix="inner"):
            numpyro.sample("scoped", dist.Normal(mu, tau))
        numpyro.sample("own", dist.Normal(mu, tau))

    centred = model("auto", program).silo_data("a", {"y": np.ones(3)}).program.centred
    assert centred == dict.fromkeys(["location", "scale", "theta", "local", "vector", "own"])


def test_a_scan_stays_as_written():
    def program(globals_, data):
        mu, tau = globals_

        def step(state, y):
            state = numpyro.sample("state", dist.Normal(0.9 * state, tau))
            numpyro.sample("y", dist.Normal(state + mu, 1.0), obs=y)
            return state, None

        first = numpyro.sample("first", dist.Normal(mu, tau))
        scan(step, first, data["y"])

    one = model("non_centred", program).silo_data("a", {"y": np.arange(4.0)})
    assert one.program.centred == {"first": 0.0}
    z, local = jnp.asarray([0.2, 0.1]), point(one)
    values = one.program.outputs(z, local, {}, one)
    free = one.program.layout.split(local)
    np.testing.assert_allclose(values["state"], free["state"])
    np.testing.assert_allclose(values["first"], 0.2 + jnp.exp(0.1) * free["first"])
    with pytest.raises(sfvi.ModelError, match="has the latent 'state', which lies in a scan; it stays as written"):
        model({"state": 0.5}, program).silo_data("a", {"y": np.arange(4.0)})


# What the user sees


def nested(globals_, data):
    """Plates and events of equal size: only the site itself can say which is which."""
    mu, tau = globals_
    with numpyro.plate("schools", 2, dim=-2):
        a = numpyro.sample("a", dist.Normal(mu, tau))
        with numpyro.plate("classes", 2, dim=-1):
            c = numpyro.sample("c", dist.Normal(a[..., None], tau).expand([2, 2, 2]).to_event(1))
            numpyro.sample("y", dist.Normal(c, 1.0).to_event(1), obs=data["y"])


def test_results_are_of_the_sites_as_written():
    data = {"y": np.arange(8.0).reshape(2, 2, 2)}
    labels = {"classes": ["red", "blue"], "visit": ["first", "second"]}
    found = {}
    for centring in ("as_written", "learned"):
        built = sfvi.StructuredModel(population, nested, dims={"c": ["visit"]}, coords=labels, centring=centring)
        fit = sfvi.fit(built, {"x": data, "z": data}, key=0, num_rounds=20, algorithm=PLAIN)
        posterior = fit.silo("x").to_arviz(num_samples=5).posterior
        dims = {name: (array.dims, array.shape) for name, array in posterior.items()}
        coords = {name: list(values.values) for name, values in posterior.coords.items()}
        found[centring] = dims, coords, list(fit.silo("x").summary(num_samples=5).index)
        assert set(fit.theta) == ({"a_centered", "c_centered"} if centring == "learned" else set())
    assert found["as_written"] == found["learned"]
    assert found["learned"][0]["c"][0] == ("chain", "draw", "schools", "classes", "visit")
    assert "c[1, red, second]" in found["learned"][2]


def test_messages_name_the_users_site():
    one = model("learned").silo_data("a", simulate(3))
    theta = {"b_centered": jnp.zeros(())}
    assert set(one.program.log_terms(jnp.zeros(2), point(one), theta, one, {})) == {"b", "y"}

    def masked(globals_, data):
        with numpyro.plate("units", 3), numpyro.handlers.mask(mask=jnp.arange(3) > 0):
            b = numpyro.sample("b", dist.Normal(*globals_))
            numpyro.sample("y", dist.Normal(b[:, None], 0.5).to_event(1), obs=data["y"])

    with pytest.raises(sfvi.ModelError, match="masks the latent 'b'"):
        model("non_centred", masked).silo_data("a", simulate(3))


def gamma_effects(globals_, data):
    mu, tau = globals_
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Gamma(2.0, tau))
        numpyro.sample("y", dist.Normal(b[:, None] + mu, 0.5).to_event(1), obs=data["y"])


def taken_name(globals_, data):
    mu, tau = globals_
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, tau))
        numpyro.deterministic("b_centered", b - mu)
        numpyro.sample("y", dist.Normal(b[:, None], 0.5).to_event(1), obs=data["y"])


def scoped(globals_, data):
    with numpyro.handlers.scope(prefix="in"):
        silo(globals_, data)


BAD = [
    (
        "centered",
        silo,
        sfvi.OptionError,
        r"centring is 'centered'; choose 'as_written', 'non_centred', 'learned', 'auto'",
    ),
    (0.5, silo, sfvi.OptionError, r"centring is 0.5; choose .* or give a mapping"),
    (
        {"b": "centered"},
        silo,
        sfvi.OptionError,
        r"centring of 'b' is 'centered'; choose .*, or give a number from 0 to 1",
    ),
    ({"b": 1.5}, silo, sfvi.OptionError, r"centring of 'b' is 1.5; .* number from 0 to 1"),
    ({"b": float("nan")}, silo, sfvi.OptionError, r"centring of 'b' is nan"),
    ({"b": True}, silo, sfvi.OptionError, r"centring of 'b' is True"),
    (
        {"c": "learned"},
        silo,
        sfvi.ModelError,
        r"centring names 'c', which is no local latent of any silo; there are 'b'",
    ),
    ({"mu": 0.0}, silo, sfvi.ModelError, r"centring names 'mu', which is no local latent"),
    ({"b": 0.5}, gamma_effects, sfvi.ModelError, r"silo 'a' has the latent 'b', which is no Normal, StudentT"),
    ("learned", taken_name, sfvi.ModelError, r"has a site 'b_centered', a name that centring needs for 'b'; rename it"),
    ({"in/b": 0.0}, scoped, sfvi.ModelError, r"has the latent 'in/b', which a handler of the program renames"),
]


@pytest.mark.parametrize(
    ("centring", "program", "error", "sentence"), BAD, ids=lambda x: x if isinstance(x, str) else ""
)
def test_bad_input(centring, program, error, sentence):
    with pytest.raises(error, match=sentence) as caught:
        sfvi.fit(model(centring, program), {"a": simulate(3)}, key=0, num_rounds=1)
    assert "decentered" not in str(caught.value)


def test_what_cannot_be_recentred_may_be_left_to_a_word():
    for centring in ("learned", "auto", {"b": "as_written"}, {"b": "auto"}, {"b": 1}):
        assert model(centring, gamma_effects).silo_data("a", simulate(3)).program.centred == {}
    assert model("non_centred", taken_name).silo_data("a", simulate(3)).program.centred == {"b": 0.0}


def test_a_program_for_each_silo():
    programs = {"a": silo, "b": gamma_effects, "c": with_level}
    silos = {name: simulate(4, seed=i) for i, name in enumerate(programs)}
    fit = sfvi.fit(model({"level": "learned"}, programs), silos, key=0, num_rounds=20, algorithm=PLAIN)
    assert set(fit.theta) == {"level_centered"}
    assert set(fit.silo("c").sample(0, 2)) == {"mu", "log_tau", "level", "b"}


# Files


def test_files_belong_to_one_centring(tmp_path):
    silos = {"a": simulate(4), "b": simulate(6)}
    options = {"key": 0, "algorithm": dataclasses.replace(PLAIN, optimizer=optax.adam(0.01))}
    fit = sfvi.fit(model("learned"), silos, num_rounds=30, checkpoint=tmp_path / "run.npz", **options)
    fit.save(tmp_path / "fit")
    again = sfvi.load(tmp_path / "fit", model("learned"), silos)
    np.testing.assert_array_equal(again.silo("a").sample(0, 9)["b"], fit.silo("a").sample(0, 9)["b"])
    assert again.theta["b_centered"] == fit.theta["b_centered"] != START
    resumed = sfvi.fit(model("learned"), silos, num_rounds=40, checkpoint=tmp_path / "run.npz", **options)
    assert len(resumed.elbo) == 40
    np.testing.assert_array_equal(resumed.elbo[:30], fit.elbo)
    for centring in ("as_written", {"b": START}):
        with pytest.raises(sfvi.ArchiveError, match="another silo program"):
            sfvi.load(tmp_path / "fit", model(centring), silos)
        with pytest.raises(sfvi.ArchiveError, match="another model"):
            sfvi.fit(model(centring), silos, num_rounds=40, checkpoint=tmp_path / "run.npz", **options)


def test_a_silo_that_comes_later():
    fit = sfvi.fit(model("learned"), {"a": simulate(4), "b": simulate(6)}, key=0, num_rounds=30, algorithm=PLAIN)
    late = sfvi.fit_silo(fit.posterior, "c", simulate(5), key=0, num_steps=30)
    assert set(late.sample(0, 2)) == {"mu", "log_tau", "b"}
    assert late.sample(0, 2)["b"].shape == (2, 5)
