"""What the model makes of two programs: densities, Jacobians, units, minibatches."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer.util import log_density

import sfvi
from sfvi import _jaxpr
from sfvi.families import Local

from ..helpers import gamma_data, gamma_model, gamma_population, gamma_silo, pooled_log_density


def point(silo, seed=0):
    """Unconstrained latents of a silo at random."""
    generator = np.random.default_rng(seed)
    layout = silo.program.layout
    own = jnp.asarray(generator.normal(size=(layout.own.size, 1))) if layout.own.size else None
    units = {g.plate.name: jnp.asarray(generator.normal(size=(g.block, g.plate.size))) for g in layout.groups}
    return Local(own, units)


def groups(silo):
    return {g.plate.name: ([s.name for s in g.sites], g.block) for g in silo.program.layout.groups}


def log_joint(population, silo_fn, values, data, theta=None):
    def joint():
        silo_fn(population(), data)

    return log_density(joint, (), {}, {**values, **(theta or {})})[0]


def test_jacobians_are_counted_once_on_the_right_side():
    model = gamma_model()
    data = gamma_data()
    silo = model.silo_data("a", data)
    z, local = jnp.asarray([0.3, -0.4, 0.2]), point(silo)
    theta = {"scale": jnp.log(1.5), "shift": jnp.asarray(0.2)}
    shared = model.population.log_prob(z, theta)
    prior = dist.Normal(0.0, 1.5).log_prob(z[:2]).sum() + dist.HalfNormal(2.0).log_prob(jnp.exp(z[2]))
    np.testing.assert_allclose(shared, prior + z[2], rtol=1e-12)
    own = silo.program.log_prob(z, local, theta, silo, {})
    units = local.units["units"]
    values = {"beta": z[:2], "sigma": jnp.exp(z[2]), "a": units[0], "r": jnp.exp(units[1])}
    joint = pooled_log_density(gamma_population, gamma_silo, {"scale": 1.5, "shift": 0.2}, values, data)
    np.testing.assert_allclose(own, joint - prior + units[1].sum(), rtol=1e-12)


def test_support_that_depends_on_another_site():
    def population():
        top = numpyro.sample("top", dist.LogNormal(0.0, 1.0))
        return numpyro.sample("u", dist.Uniform(0.0, top))

    def silo(u, data):
        numpyro.sample("y", dist.Normal(u, 1.0), obs=data["y"])

    model = sfvi.StructuredModel(population, silo)
    z = jnp.asarray([0.4, -0.7])
    top = jnp.exp(z[0])
    u = top * jax.nn.sigmoid(z[1])
    jacobian = z[0] + jnp.log(top * jax.nn.sigmoid(z[1]) * jax.nn.sigmoid(-z[1]))
    expected = dist.LogNormal(0.0, 1.0).log_prob(top) - jnp.log(top) + jacobian
    np.testing.assert_allclose(model.population.log_prob(z, {}), expected, rtol=1e-12)
    np.testing.assert_allclose(model.population.outputs(z, {})["u"], u, rtol=1e-12)


class TestUnits:
    """Which latents form a block."""

    @staticmethod
    def population():
        return numpyro.sample("mu", dist.Normal(0.0, 1.0))

    def silo_of(self, program, data):
        return sfvi.StructuredModel(self.population, program).silo_data("a", data)

    def check_density(self, program, data, seed=1):
        model = sfvi.StructuredModel(self.population, program)
        silo = model.silo_data("a", data)
        z, local = jnp.asarray([0.2]), point(silo, seed)
        ours = silo.program.log_prob(z, local, {}, silo, {}) + model.population.log_prob(z, {})
        values = {"mu": z[0], **silo.program.layout.split(local)}
        np.testing.assert_allclose(ours, log_joint(self.population, program, values, data), rtol=1e-10)

    def test_nested_plates_belong_to_the_outer_units(self):
        def program(mu, data):
            with numpyro.plate("schools", 5, dim=-2):
                a = numpyro.sample("a", dist.Normal(mu, 1.0))
                with numpyro.plate("classes", 3, dim=-1):
                    c = numpyro.sample("c", dist.Normal(a, 1.0))
                    numpyro.sample("y", dist.Normal(c, 1.0), obs=data["y"])

        data = {"y": np.ones((5, 3))}
        assert groups(self.silo_of(program, data)) == {"schools": (["a", "c"], 4)}
        self.check_density(program, data)

    def test_the_common_plate_counts_whatever_the_order(self):
        def program(mu, data):
            with numpyro.plate("children", 5, dim=-1):
                b = numpyro.sample("b", dist.Normal(mu, 1.0))
            with numpyro.plate("visits", 3, dim=-2), numpyro.plate("children_again", 5, dim=-1):
                numpyro.sample("y", dist.Normal(b, 1.0), obs=data["y"])

        assert groups(self.silo_of(program, {"y": np.ones((3, 5))})) == {"children": (["b"], 1)}
        self.check_density(program, {"y": np.ones((3, 5))})

    def test_vector_sites_and_simplices(self):
        def program(mu, data):
            with numpyro.plate("docs", 4):
                w = numpyro.sample("w", dist.Dirichlet(jnp.ones(3) * jnp.exp(mu)))
                v = numpyro.sample("v", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))
                numpyro.sample("y", dist.Normal(w.sum(-1) + v.sum(-1), 1.0), obs=data["y"])

        silo = self.silo_of(program, {"y": np.ones(4)})
        assert groups(silo) == {"docs": (["w", "v"], 2 + 2)}

    def test_latents_outside_any_plate_belong_to_the_silo(self):
        def program(mu, data):
            level = numpyro.sample("level", dist.Normal(mu, 1.0))
            with numpyro.plate("patients", data["y"].shape[0]):
                b = numpyro.sample("b", dist.Normal(level, 1.0))
                numpyro.sample("y", dist.Normal(b, 1.0), obs=data["y"])

        data = {"y": np.arange(4.0)}
        silo = self.silo_of(program, data)
        assert [site.name for site in silo.program.layout.own.sites] == ["level"]
        assert groups(silo) == {"patients": (["b"], 1)}
        self.check_density(program, data)

    def test_two_unrelated_plates(self):
        def program(mu, data):
            for name in ("wards", "labs"):
                with numpyro.plate(name, data[name].shape[0]):
                    b = numpyro.sample(f"b_{name}", dist.Normal(mu, 1.0))
                    numpyro.sample(f"y_{name}", dist.Normal(b, 1.0), obs=data[name])

        data = {"wards": np.ones(2), "labs": np.ones(3)}
        assert groups(self.silo_of(program, data)) == {"wards": (["b_wards"], 1), "labs": (["b_labs"], 1)}
        self.check_density(program, data)

    def test_crossed_plates_are_kept_apart(self):
        def program(mu, data):
            with numpyro.plate("rows", 2, dim=-2):
                u = numpyro.sample("u", dist.Normal(mu, 1.0))
            with numpyro.plate("columns", 3, dim=-1):
                v = numpyro.sample("v", dist.Normal(mu, 1.0))
            with numpyro.plate("r", 2, dim=-2), numpyro.plate("c", 3, dim=-1):
                numpyro.sample("y", dist.Normal(u + v, 1.0), obs=data["y"])

        data = {"y": np.ones((2, 3))}
        assert groups(self.silo_of(program, data)) == {"rows": (["u"], 1), "columns": (["v"], 1)}
        self.check_density(program, data)

    def test_a_time_series_in_a_scan(self):
        def program(mu, data):
            def step(state, y):
                state = numpyro.sample("state", dist.Normal(0.9 * state, 1.0))
                numpyro.sample("y", dist.Normal(state + mu, 1.0), obs=y)
                return state, None

            scan(step, 0.0, data["y"])

        data = {"y": np.arange(4.0)}
        silo = self.silo_of(program, data)
        assert silo.program.layout.own.size == 4
        z, local = jnp.asarray([0.2]), point(silo)
        states = local.silo[:, 0]
        before = jnp.concatenate([jnp.zeros(1), states[:-1]])
        expected = dist.Normal(0.9 * before, 1.0).log_prob(states).sum()
        expected += dist.Normal(states + 0.2, 1.0).log_prob(data["y"]).sum()
        np.testing.assert_allclose(silo.program.log_prob(z, local, {}, silo, {}), expected, rtol=1e-10)

    def test_every_shape_of_model_fits(self):
        """No locals, no theta, no globals, locals without plate: each runs end to end."""

        def no_locals(mu, data):
            numpyro.sample("y", dist.Normal(mu, 1.0).expand([3]).to_event(1), obs=data["y"])

        def only_own(mu, data):
            b = numpyro.sample("b", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(b, 1.0).expand([3]).to_event(1), obs=data["y"])

        def no_globals():
            return numpyro.param("mu", 0.0)

        silos = {"a": {"y": np.ones(3)}, "b": {"y": np.zeros(3)}}
        for population, silo in [(self.population, no_locals), (self.population, only_own), (no_globals, only_own)]:
            fit = sfvi.fit(sfvi.StructuredModel(population, silo), silos, key=0, num_rounds=300)
            assert fit.elbo[-50:].mean() > fit.elbo[:50].mean()
            fit.posterior.summary(num_samples=50)
            fit.silo("a").summary(num_samples=50)


class TestMinibatches:
    @staticmethod
    def population():
        return numpyro.sample("mu", dist.Normal(0.0, 1.0))

    @staticmethod
    def program(mu, data):
        with numpyro.plate("units", data["y"].shape[0], subsample_size=2) as chosen:
            b = numpyro.sample("b", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(b, 0.5), obs=data["y"][chosen])

    def test_average_over_all_minibatches_is_the_whole(self):
        """Unbiased: exactly, by going through every pair of units."""
        silo = sfvi.StructuredModel(self.population, self.program).silo_data("a", {"y": np.arange(4.0)})
        z, local = jnp.asarray([0.3]), point(silo)
        values = []
        for pair in [(i, j) for i in range(4) for j in range(i)]:
            chosen = jnp.asarray(pair)
            drawn = Local(None, {"units": local.units["units"][:, chosen]})
            term = silo.program.log_prob(z, drawn, {}, silo, {"units": chosen})
            entropy = silo.sum_units(Local(None, {"units": drawn.units["units"][0]}))
            values.append((term, entropy))
        b, y = local.units["units"][0], np.arange(4.0)
        whole = dist.Normal(0.3, 1.0).log_prob(b).sum() + dist.Normal(b, 0.5).log_prob(y).sum()
        np.testing.assert_allclose(np.mean(values, axis=0), [whole, b.sum()], rtol=1e-12)

    def test_draws_are_uniform_without_replacement(self):
        silo = sfvi.StructuredModel(self.population, self.program).silo_data("a", {"y": np.arange(5.0)})
        chosen = jax.vmap(lambda k: silo.draw(k)["units"])(jax.random.split(jax.random.key(0), 5000))
        assert np.all(chosen[:, 0] != chosen[:, 1])
        share = np.bincount(np.asarray(chosen).ravel(), minlength=5) / 5000
        np.testing.assert_array_less(np.abs(share - 0.4), 4 * np.sqrt(0.4 * 0.6 / 5000))

    def test_only_the_drawn_units_are_touched(self):
        model = sfvi.StructuredModel(self.population, self.program)
        silo = model.silo_data("a", {"y": np.arange(6.0)})
        algorithm = sfvi.SFVI().bind(model)
        server = algorithm.server_init(jax.random.key(0), {}, jnp.ones(1))
        broadcast = algorithm.broadcast(jax.random.key(0), server)
        state = algorithm.silo_init(jax.random.key(1), broadcast, silo)
        after, _, _ = algorithm.silo_step(jax.random.key(1), state, broadcast, silo)
        changed = np.asarray(after.family.units["units"].loc != state.family.units["units"].loc)[0]
        assert changed.sum() == 2
        counts = np.asarray(jax.tree.leaves(after.opt_state)[0])
        np.testing.assert_array_equal(counts, changed.astype(int))

    def test_minibatches_reach_the_posterior_of_all_data(self):
        """Conjugate: marginally y ~ N(mu, 1.25), so mu has a known posterior."""
        y = np.random.default_rng(0).normal(0.7, 1.2, size=40)
        precision = 1 + 40 / 1.25
        silos = {"a": {"y": y[:25]}, "b": {"y": y[25:]}}
        model = sfvi.StructuredModel(self.population, self.program)
        fit = sfvi.fit(model, silos, key=0, num_rounds=30_000)
        mean, sd = fit.posterior.family.marginals()
        assert abs(mean[0] - y.sum() / 1.25 / precision) < 0.15 / np.sqrt(precision)
        assert abs(sd[0] * np.sqrt(precision) - 1) < 0.1

    def test_a_silo_smaller_than_the_minibatch_takes_part_with_all_it_has(self):
        model = sfvi.StructuredModel(self.population, self.program)
        silo = model.silo_data("a", {"y": np.arange(1.0)})
        assert not silo.program.layout.subsampled
        z, b = jnp.asarray([0.3]), jnp.asarray([[0.2]])
        expected = dist.Normal(0.3, 1.0).log_prob(0.2) + dist.Normal(0.2, 0.5).log_prob(0.0)
        actual = silo.program.log_prob(z, Local(None, {"units": b}), {}, silo, {})
        np.testing.assert_allclose(actual, expected, rtol=1e-12)

    def test_rows_without_latents_can_be_subsampled(self):
        def program(mu, data):
            with numpyro.plate("rows", data["y"].shape[0], subsample_size=3) as chosen:
                numpyro.sample("y", dist.Normal(mu, 1.0), obs=data["y"][chosen])

        y = np.random.default_rng(1).normal(1.0, 1.0, size=30)
        fit = sfvi.fit(
            sfvi.StructuredModel(self.population, program),
            {"a": {"y": y}},
            key=0,
            num_rounds=10_000,
            algorithm=sfvi.SFVI(optimizer=optax.adam(optax.cosine_decay_schedule(0.02, 10_000))),
        )
        np.testing.assert_allclose(fit.posterior.family.marginals()[0], y.sum() / 31, atol=0.15 / np.sqrt(31))


def test_programs_are_told_apart_by_what_they_compute():
    def other_population():
        return numpyro.sample("mu", dist.Normal(0.0, 1.0 + 1e-6))

    def same_population():
        return numpyro.sample("mu", dist.Normal(0.0, 1.0))

    one = sfvi.StructuredModel(TestUnits.population, gamma_silo).population.fingerprint()
    assert one == sfvi.StructuredModel(same_population, gamma_silo).population.fingerprint()
    assert one != sfvi.StructuredModel(other_population, gamma_silo).population.fingerprint()


@pytest.mark.parametrize("value", [3, 3.0, "text", None])
def test_constants_in_the_data_reach_the_program_unchanged(value):
    seen = []

    def program(mu, data):
        seen.append(data["constant"])
        numpyro.sample("y", dist.Normal(mu, 1.0).expand([2]).to_event(1), obs=data["y"])

    data = {"y": np.ones(2), "constant": value}
    sfvi.StructuredModel(TestUnits.population, program).silo_data("a", data)
    assert seen[0] == value
    assert type(seen[0]) is type(value)


IN_A_TERMINAL = """
import sys
import numpyro, numpyro.distributions as dist
from sfvi import _jaxpr
import jax.numpy as jnp
print(sys.stdout.isatty())
open(sys.argv[1], "w").write(_jaxpr.fingerprint(lambda x: jnp.sin(x) + 1, 1.0))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no terminals of that kind")
def test_a_fingerprint_is_the_same_in_a_terminal(tmp_path):
    """JAX prints programs in color there; what was saved in one place is read in the other."""
    import pty

    leader, follower = pty.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "print")]
    subprocess.run(command, stdout=follower, check=True, env={**os.environ, "TERM": "xterm-256color"})
    assert os.read(leader, 4).decode() == "True"
    for end in (leader, follower):
        os.close(end)
    assert (tmp_path / "print").read_text() == _jaxpr.fingerprint(lambda x: jnp.sin(x) + 1, 1.0)
