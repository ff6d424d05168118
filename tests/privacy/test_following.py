"""Under noise units follow the means of their parents: what that does to gradients, to fits, and to what leaves."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import sfvi
from sfvi.algorithms import unit_privacy
from sfvi.algorithms.grid import SPREAD
from sfvi.algorithms.under_noise import under_noise
from sfvi.engines.units import take_apart
from sfvi.families import StructuredLocal

from ..helpers import assert_trees_close, linear_data, linear_model
from . import models

PRIVATE = sfvi.UnitPrivacy(clip=0.5, noise_multiplier=3.0)


class Following:
    """A silo under noise, with latents of its own and units that follow its parents in many ways."""

    def __init__(self):
        model = models.model(models.visits_silo)
        steps = {"optimizer": optax.sgd(0.01), "local_optimizer": optax.sgd(0.0)}
        options = sfvi.SFVI(privacy=PRIVATE, bound=sfvi.bounds.elbo(), estimator="reparameterization", **steps)
        self.algorithm, self.key = options.bind(model), jax.random.key(0)
        self.data = take_apart(model, "a", model.silo_data("a", models.visits_data()), {})
        self.server = self.algorithm.server_init(self.key, {}, jnp.array([7.0]))
        self.broadcast = self.algorithm.broadcast(self.key, self.server)
        state, noise = (
            self.algorithm.silo_init(self.key, self.broadcast, self.data),
            iter(jax.random.split(self.key, 99)),
        )
        family = jax.tree.map(lambda leaf: leaf + jax.random.normal(next(noise), leaf.shape), state.family)
        self.state = state._replace(family=family)


def test_units_follow_the_means_of_their_parents():
    r"""Where these are moved by noisy steps, a unit's posterior given them stays what it is until it steps itself."""
    found = Following()
    algorithm, key, state, server = found.algorithm, found.key, found.state, found.server
    broadcast = found.broadcast

    def given(state, z_global):
        return state.family.conditional(jnp.full((1, 1), 0.3), z_global, state.center)

    for _ in range(3):
        point = broadcast.shared.family.center
        after, reply, _ = algorithm.silo_step(key, state, broadcast, found.data)
        assert_trees_close(given(after, point), given(state, point))
        assert jnp.linalg.norm(after.family.silo.loc - state.family.silo.loc) > 1e-3
        state, several = after, jax.tree.map(lambda leaf: leaf[None], reply)
        server, _ = algorithm.server_step(server, broadcast, several, algorithm.participants(key, server))
        broadcast = algorithm.broadcast(key, server)
        assert jnp.linalg.norm(broadcast.shared.family.center - point) > 1e-3


def test_gradients_are_those_of_means_that_units_follow():
    """By hand: how a unit's term changes where means move, and its own block with them."""
    found = Following()
    elbo, family, broadcast = found.algorithm.elbo, found.state.family, found.broadcast
    draw = elbo.draw(found.key, broadcast.round, found.data, elbo.global_noise(broadcast.key, broadcast.shared, 1))
    apart = found.data.apart
    at = unit_privacy._At(elbo, family, broadcast, draw, found.data, apart, follows=True)
    first = jnp.zeros((), jnp.int32)
    shared, own = at.unit(first).gradient
    shift, own_shift = jnp.array([0.3, -0.7]), jnp.array([1.1])

    def moved(by):
        center = broadcast.shared.family.loc + by * shift
        there = eqx.tree_at(lambda s: s.family.loc, broadcast.shared, center)
        block = eqx.tree_at(lambda b: b.loc, family.silo, family.silo.loc + by * own_shift[:, None])
        lag = jnp.tensordot(shift, family.silo.coupling, 1)[:, 0]
        rows = at._rows(first)["children"].recentered(by * jnp.concatenate([shift, own_shift - lag]))
        local = StructuredLocal(block, {"children": rows})
        return elbo.silo(there, local, at._noise(first), apart.take(found.data, first))

    expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
    np.testing.assert_allclose(shared.family.loc @ shift + own.loc[:, 0] @ own_shift, expected, rtol=1e-6)


def with_intercepts(globals_, data):
    """A silo's own intercept, and one of each unit."""
    mu, log_sd = globals_
    own = numpyro.sample("own", dist.Normal(0.0, 1.0))
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu + own, jnp.exp(log_sd)))
        numpyro.sample("y", dist.Normal(b[:, None], 1.0).to_event(1), obs=data["y"])


def test_a_fit_with_latents_of_silos_arrives(float32):
    """Were units moved along but gradients taken as if they stayed, this one would run away."""

    def population():
        return numpyro.sample("mu", dist.Normal(0.0, 5.0)), numpyro.sample("log_sd", dist.Normal(0.0, 1.0))

    generator = np.random.default_rng(0)
    effects = 2.0 + 0.7 * generator.normal(size=(2, 300, 1))
    silos = dict(zip("ab", ({"y": e + generator.normal(size=(300, 4))} for e in effects), strict=True))
    model = sfvi.StructuredModel(population, with_intercepts)
    plain = sfvi.fit(model, silos, key=0, num_rounds=3000)
    privacy = sfvi.UnitPrivacy(clip=2.0, noise_multiplier=0.4)
    private = sfvi.fit(model, silos, key=0, num_rounds=3000, algorithm=sfvi.SFVI(privacy=privacy))
    (mean, sd), (found, _) = (each.posterior.family.marginals() for each in (plain, private))
    noise = privacy.noise * privacy.clip * np.sqrt(2 / 3000)  # of two silos, what is left of it at the least
    assert np.all(np.abs(found - mean) / sd < 6 * np.hypot(noise, 0.5))
    assert np.mean(private.elbo[-300:]) > np.mean(plain.elbo[-300:]) - 30


LAYOUTS = {
    "own latents and visits": (lambda: models.model(models.visits_silo), lambda: models.visits_data(n=9)),
    "several numbers of a unit": (linear_model, lambda: linear_data(n=9)),
}


@pytest.mark.parametrize("broken", [1e6, np.nan, np.inf])
@pytest.mark.parametrize("family", [sfvi.families.full(), sfvi.families.low_rank(rank=1), sfvi.families.mean_field()])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nobody_elses_summand_depends_on_a_unit(layout, family, broken, monkeypatch):
    """With the same numbers leaving, round after round, another unit 3 changes sums by its own part, and no other
    unit's parameters; with a silo that is absent now and then, and far moves of the server meanwhile."""
    privacy, rounds, who = sfvi.UnitPrivacy(clip=0.7, noise_multiplier=1.0), 5, 3
    totals = []

    def said(privacy, secret, total, dtype):
        totals.append(np.asarray(total.high, float) * 2**16 + np.asarray(total.low, float))
        key = jax.random.key(len(totals))
        return privacy.noise * privacy.clip * jax.random.normal(key, total.low.shape, dtype)

    monkeypatch.setattr(unit_privacy, "noisy", said)
    build, make = LAYOUTS[layout]
    model, data, key = build(), make(), jax.random.key(0)
    steps = {"optimizer": under_noise(rounds), "local_optimizer": optax.adam(0.1)}
    options = sfvi.SFVI(privacy=privacy, bound=sfvi.bounds.elbo(), global_family=family, **steps)
    algorithm = options.bind(model)
    silo = take_apart(model, "a", model.silo_data("a", data), {})

    def changed(leaf):
        values = np.array(leaf)
        rows = np.flatnonzero(data["child"] == who) if len(values) != 9 else who
        if np.issubdtype(values.dtype, np.floating):
            values[rows] = broken
        return jnp.asarray(values)

    def run(silo):
        totals.clear()
        server = algorithm.server_init(key, {}, jnp.array([9.0]))
        state = algorithm.silo_init(key, algorithm.broadcast(key, server), silo)
        for number in range(rounds):
            broadcast = algorithm.broadcast(key, server)
            if number == 2:
                reply = jax.tree.map(lambda leaf: 50 * jnp.ones_like(leaf), algorithm.silent(broadcast))
            else:
                state, reply, _ = algorithm.silo_step(key, state, broadcast, silo)
            several = jax.tree.map(lambda leaf: leaf[None], reply)
            server, _ = algorithm.server_step(server, broadcast, several, algorithm.participants(key, server))
        return state, server, np.array(totals)

    with jax.debug_nans(False):
        one, other = (
            run(each) for each in (silo, dataclasses.replace(silo, values=jax.tree.map(changed, silo.values)))
        )
    public = [(state.family.silo, state.opt_state.silo, state.center, server) for state, server, _ in (one, other)]
    jax.tree.map(np.testing.assert_array_equal, *public)
    theirs = [jax.tree.map(lambda leaf: np.delete(leaf, who, -1), found[0].family.units) for found in (one, other)]
    jax.tree.map(np.testing.assert_array_equal, *theirs)
    step = privacy.noise * privacy.clip / SPREAD
    assert np.linalg.norm((one[2] - other[2]) * step, axis=1).max() <= 2 * privacy.clip
    assert np.abs(one[2] - other[2]).max() > 0
