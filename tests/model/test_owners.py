"""Rows outside the units' plate: each finds its owner, and the bound is that of the rows put inside."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import sfvi
from sfvi import bounds, families
from sfvi.errors import ModelError
from sfvi.families import Local

from ..helpers import assert_trees_close, bind, run_batched, run_one_by_one
from ..test_enhanced_bound import setting, value_and_gradients
from .test_programs import point

KEY = jax.random.key(7)
ENHANCED = bounds.locally_enhanced(3)


def population():
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    return beta, numpyro.sample("tau", dist.HalfNormal(1.0))


def effects(tau, data, block):
    with numpyro.plate("patients", data["weight"].shape[0]):
        prior = dist.Normal(0.0, tau)
        return numpyro.sample("b", prior if block == 1 else prior.expand([block]).to_event(1))


def plate_format(block):
    def silo(globals_, data):
        beta, tau = globals_
        with numpyro.plate("patients", data["weight"].shape[0]):
            prior = dist.Normal(0.0, tau)
            b = numpyro.sample("b", prior if block == 1 else prior.expand([block]).to_event(1))
            eta = b[:, None] if block == 1 else jnp.einsum("npk,nk->np", data["x"], b)
            numpyro.sample("y", dist.Bernoulli(logits=data["x"] @ beta + eta).to_event(1), obs=data["y"])

    return sfvi.StructuredModel(population, silo)


def long_format(block):
    def silo(globals_, data):
        beta, tau = globals_
        b = effects(tau, data, block)[data["patient"]]
        with numpyro.plate("rows", len(data["y"])):
            eta = data["x"] @ beta + (b if block == 1 else jnp.sum(data["x"] * b, axis=-1))
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=data["y"])

    return sfvi.StructuredModel(population, silo)


def wide(patients=4, visits=3, seed=0):
    generator = np.random.default_rng(seed)
    shape = (patients, visits)
    return {
        "x": generator.normal(size=(*shape, 2)),
        "y": generator.integers(0, 2, shape),
        "weight": np.ones(patients),
    }


def long(data, seed=0):
    """The same data with a row for each visit, in any order."""
    patients, visits = data["y"].shape
    order = np.random.default_rng(seed).permutation(patients * visits)
    return {
        "x": data["x"].reshape(-1, 2)[order],
        "y": data["y"].ravel()[order],
        "patient": np.repeat(np.arange(patients), visits)[order],
        "weight": data["weight"],
    }


FORMATS = ((plate_format, lambda data: data), (long_format, long))


@pytest.mark.parametrize("estimator", ["stl", "reparameterization"])
@pytest.mark.parametrize("block", [1, 2], ids=["intercept", "slope"])
def test_bound_and_gradient_are_those_of_the_plate(block, estimator):
    family = families.block(within="full", coupling="mean_and_scale")
    options = {"bound": ENHANCED, "estimator": estimator, "local_family": family}
    inside, outside = (value_and_gradients(*setting(f(block), g(wide()), **options), 0) for f, g in FORMATS)
    assert_trees_close(outside, inside)


def written(program, data, population=population):
    return sfvi.StructuredModel(population, program).silo_data("a", data)


def check_sum(silo):
    """Whatever is handed out adds up to the log density."""
    z = jnp.linspace(-0.5, 0.5, silo.program.population.layout.size)
    local = point(silo)
    rest, units = silo.program.unit_log_probs(z, local, {}, silo, {})
    expected = silo.program.log_prob(z, local, {}, silo, {})
    np.testing.assert_allclose(rest + sum(u.sum() for u in units.values()), expected, rtol=1e-12)


def test_rows_of_nobody_and_hidden_dependence():
    """No unit; a zero weight; a kink that is flat at half of all points; a site without a plate, and one of one."""

    def program(globals_, data):
        beta, tau = globals_
        b = effects(tau, data, 1)
        own = jnp.where(data["patient"] < 0, 0.0, jnp.maximum(b[data["patient"]], 0.0) * data["z"])
        numpyro.sample("y", dist.Normal(beta[0] + own, 1.0), obs=data["y"])
        numpyro.factor("last", -(b[2] ** 4))
        numpyro.sample("mean", dist.Normal(beta[1], 1.0), obs=data["y"][0])

    data = {"y": np.arange(5.0), "patient": np.array([2, -1, 0, 1, 2]), "z": np.array([1, 1, 0, 1, 2.0])}
    silo = written(program, data | {"weight": np.ones(3)})
    assert silo.program.loose == ("y", "last")
    np.testing.assert_array_equal(silo.owners["y"], [2, 3, 3, 1, 2])
    np.testing.assert_array_equal(silo.owners["last"], 2)
    assert silo.program.separates({}, silo)
    check_sum(silo)
    z, local = jnp.zeros(3), point(silo)
    moved = Local(None, {"patients": local.units["patients"].at[:, 1].add(1.0)})
    before, after = (silo.program.unit_log_probs(z, at, {}, silo, {}) for at in (local, moved))
    np.testing.assert_allclose(after[0], before[0], rtol=1e-14)
    np.testing.assert_array_equal(after[1]["patients"] == before[1]["patients"], [True, False, True])


def test_kinks():
    """Flat on one side for each of many units: both signs are tried."""

    def program(globals_, data):
        b = effects(globals_[1], data, 1)
        numpyro.factor("kink", -(jnp.maximum(b, 0.0) ** 2))

    silo = written(program, {"weight": np.ones(40)})
    np.testing.assert_array_equal(silo.owners["kink"], np.arange(40))


@pytest.mark.parametrize("steepness", [1e2, 1e200])
def test_overflow(steepness):
    """Derivatives that overflow at some points say nothing there; if they do so everywhere, the site has no owners."""

    def program(globals_, data):
        b = effects(globals_[1], data, 1)[data["patient"]]
        numpyro.factor("steep", -jnp.exp((steepness * b) ** 2))

    data = {"patient": np.array([2, 1, 1, 0]), "weight": np.ones(3)}
    owners = written(program, data).owners
    assert (steepness == 1e200) == (not owners)
    np.testing.assert_array_equal(owners.get("steep", data["patient"]), data["patient"])


def two_plates(globals_, data):
    beta, tau = globals_
    b = effects(tau, data, 1)
    with numpyro.plate("clinics", data["size"].shape[0]):
        u = numpyro.sample("u", dist.Normal(beta[0], tau))
    both = jnp.stack([b[data["patient"]], u[data["clinic"]]], axis=-1)
    with numpyro.plate("rows", len(data["y"])):
        numpyro.sample("y", dist.Normal(jnp.sum(both * data["part"], axis=-1), 1.0), obs=data["y"])


def crossed(part):
    data = {"y": np.arange(4.0), "patient": np.array([0, 1, 2, 1]), "clinic": np.array([1, 0, 0, 1])}
    return data | {"weight": np.ones(3), "size": np.ones(2), "part": np.asarray(part, float)}


def test_units_of_two_plates():
    """A row may belong to a member of either plate, not to one of each."""
    silo = written(two_plates, crossed([[1, 0], [0, 1], [1, 0], [0, 1]]))
    np.testing.assert_array_equal(silo.owners["y"], [0, 3, 2, 4])
    assert silo.program.separates({}, silo)
    check_sum(silo)
    tangled = written(two_plates, crossed([[1, 0], [0, 1], [1, 1e-6], [0, 1]]))
    assert not tangled.owners
    assert not tangled.program.separates({}, tangled)
    check_sum(tangled)


def duel(globals_, data):
    beta, tau = globals_
    b = effects(tau, data, 1)
    with numpyro.plate("rows", len(data["y"])):
        numpyro.sample("y", dist.Normal(beta[0] + b[data["one"]] - 2.0 * b[data["other"]], 1.0), obs=data["y"])


def test_rows_of_two_units_are_refused():
    """What the data of one silo say counts for that silo: here only the second has rows of two units."""
    rows = {"y": np.arange(4.0), "one": np.array([0, 1, 2, 0]), "weight": np.ones(3)}
    silos = {"alone": rows | {"other": rows["one"]}, "pairs": rows | {"other": np.array([0, 1, 2, 1])}}
    model = sfvi.StructuredModel(population, duel)
    assert sfvi.fit(model, {"alone": silos["alone"]}, key=0, num_rounds=2).posterior.bound == bounds.locally_enhanced()
    fit = sfvi.fit(model, silos, key=0, num_rounds=2)
    assert fit.posterior.bound == bounds.elbo()
    with pytest.raises(ModelError, match=r"'pairs' does not separate.*'patients'"):
        sfvi.fit(model, silos, key=0, num_rounds=2, algorithm=sfvi.SFVI(bound=ENHANCED))


@pytest.mark.parametrize("plate", ["patients", "rows"])
def test_minibatches_fall_back(plate):
    """A minibatch of rows makes the bound another one, and rows of units that are not drawn have no latents."""

    def program(globals_, data):
        beta, tau = globals_
        with numpyro.plate("patients", 3, subsample_size=2 if plate == "patients" else None):
            b = numpyro.sample("b", dist.Normal(0.0, tau))
        with numpyro.plate("rows", 6, subsample_size=4 if plate == "rows" else None) as rows:
            numpyro.sample("y", dist.Normal(beta[0] + b[data["patient"][rows]], 1.0), obs=data["y"][rows])

    silo = written(program, {"y": np.arange(6.0), "patient": np.arange(6) % 2})
    assert not silo.owners
    assert not silo.program.separates({}, silo)


def test_single_precision(float32):
    silo = long_format(2).silo_data("a", data := long(wide()))
    np.testing.assert_array_equal(silo.owners["y"], data["patient"])
    assert silo.owners["y"].dtype == jnp.int32
    assert silo.program.separates({}, silo)


# How silos are computed


def compare(model, silos, *, merge, kinds):
    algorithm, data, theta = bind(model, silos, bound=ENHANCED)
    server, local, batches = run_batched(model, algorithm, data, theta, KEY, 3, merge=merge)
    assert [(batch.names, batch.stacked) for batch in batches] == kinds
    expected = run_one_by_one(algorithm, data, theta, KEY, 3)
    assert_trees_close((server.shared, local), (expected[0].shared, expected[1]), rtol=1e-9)
    return batches


@pytest.mark.parametrize("sizes", [(5, 5), (6, 5)], ids=["stacked", "padded"])
def test_silos_side_by_side(sizes):
    """Indices do not survive laying silos end to end, so that way is not taken even where it may be."""
    silos = {name: long(wide(size, seed=i), seed=i) for i, (name, size) in enumerate(zip("ab", sizes, strict=True))}
    (batch,) = compare(long_format(1), silos, merge=True, kinds=[(("a", "b"), True)])
    assert bool(batch.data.sizes) == (sizes == (6, 5))


def test_silos_end_to_end():
    """Where rows follow their units without an index, silos are merged and owners found anew."""

    def program(globals_, data):
        beta, tau = globals_
        b = jnp.repeat(effects(tau, data, 1), 2)
        with numpyro.plate("rows", len(data["y"])):
            numpyro.sample("y", dist.Bernoulli(logits=data["x"] @ beta + b), obs=data["y"])

    silos = {name: wide(size, 2) for name, size in (("a", 4), ("b", 3))}
    silos = {name: data | {"x": data["x"].reshape(-1, 2), "y": data["y"].ravel()} for name, data in silos.items()}
    model = sfvi.StructuredModel(population, program)
    (batch,) = compare(model, silos, merge=True, kinds=[(("a", "b"), False)])
    np.testing.assert_array_equal(batch.data.owners["y"], np.repeat(np.arange(7), 2))


# Through the front door


ALGORITHMS = {
    "sfvi": sfvi.SFVI(),
    "avg": sfvi.SFVIAvg(num_local_steps=2, refit_steps=2),
    "sites": sfvi.Sites(num_local_steps=5),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_fits_agree(name):
    fits = []
    for build, shape in FORMATS:
        silos = {"a": shape(wide()), "b": shape(wide(seed=1))}
        fits.append(sfvi.fit(build(1), silos, key=0, num_rounds=2, algorithm=ALGORITHMS[name]))
    inside, outside = fits
    assert inside.posterior.bound == outside.posterior.bound == bounds.locally_enhanced()
    np.testing.assert_allclose(outside.elbo, inside.elbo, rtol=1e-8)
    assert_trees_close(outside.posterior.family, inside.posterior.family, rtol=1e-7)
    assert_trees_close(outside.silo("b").family, inside.silo("b").family, rtol=1e-7)


def test_a_silo_that_joins_and_its_file(tmp_path):
    joined = []
    for build, shape in FORMATS:
        fit = sfvi.fit(build(1), {"a": shape(wide())}, key=0, num_rounds=2)
        joined.append(sfvi.fit_silo(fit.posterior, "new", shape(wide(5, seed=3)), key=1, num_steps=5))
    draws = [silo.sample(2, 30)["b"] for silo in joined]
    np.testing.assert_allclose(draws[1], draws[0], rtol=1e-7)
    joined[1].save(tmp_path / "new.npz")
    again = sfvi.SiloPosterior.load(tmp_path / "new.npz", long_format(1), long(wide(5, seed=3)))
    np.testing.assert_array_equal(again.sample(2, 30)["b"], draws[1])


def test_a_silo_that_joins_is_checked():
    rows = {"y": np.arange(3.0), "one": np.arange(3), "weight": np.ones(3)}
    fit = sfvi.fit(sfvi.StructuredModel(population, duel), {"a": rows | {"other": np.arange(3)}}, key=0, num_rounds=2)
    with pytest.raises(ModelError, match="'pairs' does not separate"):
        sfvi.fit_silo(fit.posterior, "pairs", rows | {"other": np.array([1, 2, 0])}, key=1, num_steps=2)
