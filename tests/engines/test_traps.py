"""Programs for which computing silos together, or masking, would be wrong in a way that is easy to miss."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.contrib.control_flow import scan

import sfvi
from sfvi.engines import batching

from ..helpers import bind


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 10.0))


def batches(silo, silos, **options):
    model = sfvi.StructuredModel(population, silo)
    algorithm, data, theta = bind(model, silos, **options)
    return batching.plan(model, data, theta, merge=algorithm.additive)


def rows(*sizes, seed=0):
    generator = np.random.default_rng(seed)
    return {f"s{j}": {"y": generator.normal(size=n)} for j, n in enumerate(sizes)}


def plain(mu, data):
    with numpyro.plate("u", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(b, 0.5), obs=data["y"])


def test_a_statistic_that_agrees_in_most_silos():
    def silo(mu, data):
        x = data["x"] / data["x"].max()
        with numpyro.plate("u", x.shape[0]):
            numpyro.sample("y", dist.Normal(mu * x, 1.0), obs=data["y"])

    silos = rows(20, 20, 20, 20)
    for (name, data), top in zip(silos.items(), (10.0, 2.0, 10.0, 10.0), strict=True):
        silos[name] = {**data, "x": np.linspace(1.0, top, 20)}
    assert all(batch.stacked for batch in batches(silo, silos))


def test_a_small_site_beside_a_huge_one():
    def silo(mu, data):
        numpyro.sample("anchor", dist.Normal(mu, 1.0), obs=data["anchor"])
        with numpyro.plate("u", data["y"].shape[0]):
            numpyro.sample("y", dist.Normal(0.0, 1.0), obs=data["y"])

    silos = {name: {"y": 1e5 * data["y"], "anchor": np.array(1.0)} for name, data in rows(50, 50, 50).items()}
    assert all(batch.stacked for batch in batches(silo, silos))


def test_a_penalty_that_vanishes_at_the_initial_theta():
    def silo(mu, data):
        shift = numpyro.param("shift", 0.0)
        numpyro.factor("penalty", -(shift**2))
        with numpyro.plate("u", data["y"].shape[0]):
            numpyro.sample("y", dist.Normal(mu + shift, 1.0), obs=data["y"])

    assert all(batch.stacked for batch in batches(silo, rows(3, 4)))


def test_an_inner_plate_of_latents_is_never_padded():
    def silo(mu, data):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        n, t = data["y"].shape
        with numpyro.plate("u", n, dim=-2), numpyro.plate("t", t, dim=-1):
            c = numpyro.sample("c", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(mu + a + c, 1.0), obs=data["y"])

    silos = {"a": {"y": np.zeros((6, 9))}, "b": {"y": np.zeros((6, 10))}}
    assert len(batches(silo, silos)) == 2


def test_an_optimizer_that_couples_units_keeps_silos_apart():
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05))
    assert all(batch.stacked for batch in batches(plain, rows(6, 6), local_optimizer=clipped))
    assert not any(batch.stacked for batch in batches(plain, rows(6, 6)))


def test_a_plate_of_the_population_does_not_stop_merging():
    def groups():
        with numpyro.plate("K", 3):
            return numpyro.sample("mu", dist.Normal(0.0, 1.0))

    def silo(mu, data):
        plain(mu.sum(), data)

    model = sfvi.StructuredModel(groups, silo)
    _, data, theta = bind(model, rows(5, 30, 9))
    assert [batch.stacked for batch in batching.plan(model, data, theta, merge=True)] == [False]


def test_padding_stays_finite_while_the_real_units_move_away():
    def silo(mu, data):
        a = numpyro.sample("a", dist.Normal(0.0, 10.0))
        numpyro.sample("ya", dist.Normal(a, 0.1), obs=data["ya"])
        with numpyro.plate("u", data["y"].shape[0]):
            b = numpyro.sample("b", dist.Normal(0.0, 10.0))
            numpyro.sample("y", dist.Normal(b, 0.1), obs=data["y"])
            numpyro.sample("k", dist.Poisson(jnp.exp(20 * (a - b))), obs=data["k"])

    silos = {n: {"y": np.full(k, 6.0), "k": np.ones(k, int), "ya": np.full(1, 6.0)} for n, k in (("a", 7), ("b", 8))}
    with jax.enable_x64(False):
        fit = sfvi.fit(
            sfvi.StructuredModel(population, silo),
            silos,
            key=0,
            num_rounds=1000,
            algorithm=sfvi.SFVI(init_scale=0.01, optimizer=optax.adam(0.02), bound=sfvi.bounds.elbo()),
        )
    assert np.all(np.isfinite(fit.elbo))


@pytest.mark.parametrize(
    "silos",
    [
        {"a": {"y": np.ones(10), "sd": np.array(1.0)}, "b": {"y": np.ones(11), "sd": np.array(2.0)}},
        {"a": {"y": np.ones(6), "sd": np.ones((6, 4))}, "b": {"y": np.ones(7), "sd": np.ones((7, 5))}},
    ],
    ids=["numbers without dimension", "other dimensions that differ"],
)
def test_odd_shapes_run(silos):
    def silo(mu, data):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("u", data["y"].shape[0]):
            numpyro.sample("y", dist.Normal(mu + a, data["sd"].mean()), obs=data["y"])

    assert len(sfvi.fit(sfvi.StructuredModel(population, silo), silos, key=0, num_rounds=2).elbo) == 2


def test_masks_and_points_under_wrappers_are_seen():
    def masked(mu, data):
        with numpyro.plate("u", 3):
            b = numpyro.sample("b", dist.Normal(jnp.zeros(2), 1.0).mask(jnp.array([True, False])).to_event(1))
            numpyro.sample("y", dist.Normal(mu + b[..., 0], 1.0), obs=data["y"])

    def point(mu, data):
        b = numpyro.sample("b", dist.Delta(jnp.zeros(2)).to_event(1))
        numpyro.sample("y", dist.Normal(mu + b.sum(), 1.0).expand([3]).to_event(1), obs=data["y"])

    for silo, word in ((masked, "masks the latent 'b'"), (point, "Delta")):
        with pytest.raises(sfvi.ModelError, match=word):
            sfvi.StructuredModel(population, silo).silo_data("a", rows(3)["s0"])


def test_a_plate_inside_a_scan():
    def silo(mu, data):
        def step(state, y):
            with numpyro.plate("u", 3):
                state = numpyro.sample("z", dist.Normal(state, 1.0))
                numpyro.sample("y", dist.Normal(mu + state, 1.0), obs=y)
            return state, None

        scan(step, jnp.zeros(3), data["y"])

    layout = sfvi.StructuredModel(population, silo).silo_data("a", {"y": np.zeros((4, 3))}).program.layout
    assert [(group.plate.name, group.plate.size, group.block) for group in layout.groups] == [("u", 3, 4)]


def test_a_likelihood_written_as_a_factor():
    def silo(mu, data):
        numpyro.factor("loglik", dist.Normal(mu, 1.0).log_prob(data["y"]).sum())

    fit = sfvi.fit(sfvi.StructuredModel(population, silo), rows(5, 6), key=0, num_rounds=5)
    assert len(fit.elbo) == 5


def test_constraints_and_initial_values_of_parameters():
    """A constraint with array bounds, and initial values drawn from a key, in either program."""

    def shared():
        bounds = dist.constraints.interval(jnp.zeros(2), jnp.full(2, 3.0))
        w = numpyro.param("w", lambda key: jax.random.uniform(key, (2,)) + 1.0, constraint=bounds)
        return numpyro.sample("mu", dist.Normal(w.sum(), 1.0))

    def silo(mu, data):
        tau = numpyro.param("tau", lambda key: jnp.ones(()), constraint=dist.constraints.positive)
        numpyro.sample("y", dist.Normal(mu, tau).expand(data["y"].shape).to_event(1), obs=data["y"])

    fit = sfvi.fit(sfvi.StructuredModel(shared, silo), rows(4, 5), key=0, num_rounds=20)
    assert np.all((fit.theta["w"] > 0) & (fit.theta["w"] < 3))
    assert fit.theta["tau"] > 0


class TestData:
    def test_constants_are_compared_by_value(self):
        class Opaque:
            pass

        model = sfvi.StructuredModel(population, plain)
        with pytest.raises(sfvi.DataError, match=r"Silo 'a': data\['w'\] is a Opaque"):
            model.silo_data("a", {"y": np.ones(3), "w": Opaque()})

    def test_values_that_do_not_fit_are_refused(self, float32):
        model = sfvi.StructuredModel(population, plain)
        for bad in (np.array([2**33 + 1, 1]), np.array([1e39, 1.0])):
            with pytest.raises(sfvi.DataError, match=r"data\['y'\] has values too large"):
                model.silo_data("a", {"y": bad})


class TestFiles:
    def test_an_unwritable_checkpoint_is_noticed_before_any_round(self, tmp_path):
        (tmp_path / "file").touch()
        seen = []
        with pytest.raises(sfvi.OptionError, match="cannot be written"):
            sfvi.fit(
                sfvi.StructuredModel(population, plain),
                rows(3),
                key=0,
                num_rounds=3,
                checkpoint=tmp_path / "file" / "run.npz",
                callback=seen.append,
            )
        assert not seen

    def test_a_checkpoint_remembers_the_unit_ids(self, tmp_path):
        model, file = sfvi.StructuredModel(population, plain), tmp_path / "run.npz"
        sfvi.fit(model, rows(3), key=0, num_rounds=3, checkpoint=file, unit_ids={"s0": [0, 1, 2]})
        with pytest.raises(sfvi.ArchiveError, match="another assignment of unit_ids"):
            sfvi.fit(model, rows(3), key=0, num_rounds=5, checkpoint=file, unit_ids={"s0": [5, 6, 7]})

    def test_constants_inside_jitted_helpers_change_the_fingerprint(self):
        def make(values):
            constant = jnp.asarray(values)
            helper = jax.jit(lambda x: x * constant)

            def program():
                return numpyro.sample("mu", dist.Normal(helper(jnp.ones(2)).sum(), 1.0))

            return sfvi.StructuredModel(program, plain).population.fingerprint()

        assert make([1.0, 2.0]) != make([3.0, 4.0])

    @pytest.mark.parametrize("plate", ["it's", "a['b']", "x\\y", "new\nline"])
    def test_plates_and_silos_may_be_called_anything(self, plate, tmp_path):
        def silo(mu, data):
            with numpyro.plate(plate, data["y"].shape[0]):
                b = numpyro.sample("b", dist.Normal(mu, 1.0))
                numpyro.sample("y", dist.Normal(b, 0.5), obs=data["y"])

        model, name = sfvi.StructuredModel(population, silo), "ü/" * 150
        silos = {name: rows(3)["s0"]}
        fit = sfvi.fit(model, silos, key=0, num_rounds=3)
        fit.save(tmp_path)
        again = sfvi.load(tmp_path, model, silos)
        assert again.silo(name).summary(num_samples=10).equals(fit.silo(name).summary(num_samples=10))
