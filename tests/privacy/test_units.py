"""Differential privacy of units: what a unit can change is bounded, and without noise nothing changes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.flatten_util import ravel_pytree

import sfvi
from sfvi.algorithms import unit_privacy
from sfvi.algorithms.grid import SPREAD
from sfvi.algorithms.measure import Measure
from sfvi.algorithms.privacy import LEAST_CLIP, MOST_CLIP, summand
from sfvi.algorithms.unit_privacy import AT_ONCE
from sfvi.engines.units import take_apart
from sfvi.errors import OptionError

from ..helpers import assert_trees_close, linear_data, linear_model
from . import models

SEEN = sfvi.UnitPrivacy(clip=math.inf, noise_multiplier=0.0)
PRIVATE = sfvi.UnitPrivacy(clip=0.5, noise_multiplier=3.0)


@pytest.mark.parametrize("layout", models.LAYOUTS)
def test_without_noise_the_result_is_the_same(layout):
    """Silos of different sizes, one by one, padded or in tables: to the order of sums."""
    model, data, bound = models.LAYOUTS[layout]
    silos = {"a": data(seed=0), "b": data(n=9, seed=1), "c": data(n=9, seed=2)}
    run = functools.partial(sfvi.fit, model(), silos, key=0, num_rounds=20)
    plain = run(algorithm=sfvi.SFVI(bound=bound))
    private = run(algorithm=sfvi.SFVI(bound=bound, privacy=SEEN))
    assert_trees_close(private.posterior.shared, plain.posterior.shared)
    for name in silos:
        assert_trees_close(private.silo(name).free, plain.silo(name).free)
    np.testing.assert_allclose(private.elbo, plain.elbo, rtol=1e-9)
    assert math.isinf(private.privacy.epsilon)
    assert "No differential privacy" in str(private.privacy)


class Sides:
    """A silo with and without its last unit, under the same broadcasts."""

    def __init__(self, build, clip):
        self.model = build()
        privacy = sfvi.UnitPrivacy(clip=clip, noise_multiplier=0.0)
        options = sfvi.SFVI(privacy=privacy, optimizer=optax.sgd(1.0), bound=sfvi.bounds.elbo())
        self.algorithm = options.bind(self.model)
        self.key = jax.random.key(0)
        self._compiled = {}

    def rounds(self, data, num_rounds):
        """What leaves, and how the silo's own parameters move, at broadcasts that do not depend on the data."""
        size = len(data["x"])
        if size not in self._compiled:
            silo = take_apart(self.model, "a", self.model.silo_data("a", data), {})
            self._compiled[size] = silo, jax.jit(self._rounds, static_argnums=1)
        silo, compiled = self._compiled[size]
        values = {name: jnp.asarray(value) for name, value in zip(silo.values, jax.tree.leaves(data), strict=True)}
        return compiled(dataclasses.replace(silo, values=values), num_rounds)

    def _rounds(self, silo, num_rounds):
        server = self.algorithm.server_init(self.key, {}, jnp.ones(1))
        state = self.algorithm.silo_init(self.key, self.algorithm.broadcast(self.key, server), silo)
        seen = []
        for number in range(num_rounds):
            server = server._replace(round=jnp.asarray(number))
            broadcast = self.algorithm.broadcast(self.key, server)
            before = state.family.silo
            state, reply, _ = self.algorithm.silo_step(self.key, state, broadcast, silo)
            own = jax.tree.map(jnp.subtract, state.family.silo, before)
            seen.append(Measure(broadcast.shared, before).into((reply.gradient, own)))
            if before is not None:  # in the protocol its noise makes it public; here both sides must have the same
                state = state._replace(family=dataclasses.replace(state.family, silo=before))
        return jnp.stack(seen)


CLIP = 0.7
SIDES = {
    "units": (functools.cache(lambda: Sides(linear_model, CLIP)), linear_data),
    "rows": (functools.cache(lambda: Sides(lambda: models.model(models.rows_silo), CLIP)), models.rows_data),
}


@pytest.mark.parametrize("kind", SIDES)
@settings(max_examples=25)
@given(noise=arrays(float, (6, 3), elements=st.floats(-1e4, 1e4)), size=st.floats(1e-3, 1e3))
def test_a_unit_changes_no_reply_by_more_than_the_clip(kind, noise, size):
    """Neighbouring data sets: any values, over several rounds, in which the unit's own parameters move too."""
    sides, data = SIDES[kind]
    whole = data(n=6)
    whole = {name: values + size * (noise if values.ndim == 2 else noise[:, 0]) for name, values in whole.items()}
    without = {name: values[:-1] for name, values in whole.items()}
    with_unit, without_unit = (sides().rounds(each, 3) for each in (whole, without))
    change = np.linalg.norm(np.asarray(with_unit - without_unit), axis=1)
    assert np.all(change <= CLIP * (1 + 1e-9) + 1e-9 * np.abs(with_unit).max())


def test_the_bound_on_a_unit_is_reached():
    """So the test above can fail: a unit far away from all others is shortened to the clip exactly."""
    sides, data = SIDES["units"]
    whole = data(n=6)
    whole["y"][-1] += 1e3
    without = {name: values[:-1] for name, values in whole.items()}
    change = np.linalg.norm(np.asarray(sides().rounds(whole, 1) - sides().rounds(without, 1)))
    np.testing.assert_allclose(change, CLIP, rtol=1e-6)


def step(privacy, *, n=200):
    """Replies of a silo of rows under different keys: (key, coordinate)."""
    model = models.model(models.plain_silo)
    algorithm = sfvi.SFVI(privacy=privacy, bound=sfvi.bounds.elbo()).bind(model)
    data = model.silo_data("a", models.rows_data(n=n))
    data = take_apart(model, "a", data, {})
    server = algorithm.server_init(jax.random.key(0), {}, jnp.ones(1))
    broadcast = algorithm.broadcast(jax.random.key(0), server)
    state = algorithm.silo_init(jax.random.key(0), broadcast, data)

    units = Measure(broadcast.shared, None)

    @jax.jit
    @jax.vmap
    def replies(key):
        return units.into((algorithm.silo_step(key, state, broadcast, data)[1].gradient, None))

    return np.asarray(replies(jax.random.split(jax.random.key(1), 4000)))


def test_noise_has_the_size_that_is_promised():
    quiet = step(sfvi.UnitPrivacy(clip=0.5, noise_multiplier=0.0))
    found = step(sfvi.UnitPrivacy(clip=0.5, noise_multiplier=3.0)) - quiet
    error = 1 / math.sqrt(2 * found.size)  # standard error of a relative sd
    assert abs(found.std() / 1.5 - 1) < 4 * error
    assert np.all(np.abs(found.mean(0)) < 4.5 * 1.5 / math.sqrt(len(found)))
    shared = step(sfvi.UnitPrivacy(clip=0.5, noise_multiplier=3.0, shared_by=4)) - quiet
    np.testing.assert_allclose(shared, found / 2, atol=1e-5)


def test_sampled_units_make_the_same_sum_on_average():
    """Each with probability q: mean and variance of the sum are those of Poisson sampling."""
    whole = step(sfvi.UnitPrivacy(clip=0.5, noise_multiplier=0.0), n=200).mean(0)
    drawn = step(sfvi.UnitPrivacy(clip=0.5, noise_multiplier=0.0, sampling_rate=0.25), n=200)
    error = drawn.std(0) / math.sqrt(len(drawn))
    assert np.all(np.abs(drawn.mean(0) - whole) < 4.5 * error + 1e-4)
    assert np.all(drawn.std(0) > 0.05)


@pytest.mark.parametrize("double", [True, False])
def test_units_are_drawn_as_often_as_promised(double):
    rate, size = 0.9, 100_000
    with jax.enable_x64(double):
        model = linear_model()
        data = take_apart(model, "a", model.silo_data("a", linear_data(n=size)), {})
        drawn = unit_privacy._drawn(
            jax.random.key(0), sfvi.UnitPrivacy(clip=1.0, epsilon=1.0, sampling_rate=rate), data
        )
    assert abs(np.mean(drawn) - rate) < 4 * math.sqrt(rate * (1 - rate) / size)


def test_units_move_whether_they_are_drawn_or_not():
    """What stays in a silo does not tell who was drawn."""
    silos = {"a": linear_data(n=100, seed=3)}
    run = functools.partial(sfvi.fit, linear_model(), silos, key=0, num_rounds=1)
    whole, some = (
        run(algorithm=sfvi.SFVI(privacy=sfvi.UnitPrivacy(clip=1.0, noise_multiplier=0.0, sampling_rate=rate)))
        for rate in (1.0, 0.3)
    )
    assert np.all(np.asarray(some.silo("a").free.units["units"].loc != 0))
    assert_trees_close(some.silo("a").free, whole.silo("a").free)


OPTIONS = ["clip", "epsilon", "noise_multiplier", "delta", "shared_by"]
WRONG = ["1.0", None, True, math.nan, math.inf, -1.0, -1, 10**400, np.array([1.0, 2.0]), np.float32(1.0), [1.0], 1j]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in (sfvi.UnitPrivacy, sfvi.SiloPrivacy) for name in OPTIONS]
    + [(sfvi.UnitPrivacy, "sampling_rate")],
)
@pytest.mark.parametrize("value", WRONG, ids=[f"{type(value).__name__}-{str(value)[:4]}" for value in WRONG])
def test_an_option_that_means_nothing_is_named_in_one_sentence(kind, name, value):
    noise = {"epsilon": None, "noise_multiplier": 2.0} if name != "epsilon" else {}
    missing = value is None and name in ("epsilon", "noise_multiplier")
    with pytest.raises(OptionError) as caught:
        kind(**{"clip": 1.0, **noise, name: value})
    said = str(caught.value)
    assert said.startswith(f"{kind.__name__}: {'give one of epsilon' if missing else f'{name} is '}")
    assert said.endswith(".")
    assert "\n" not in said
    assert len(said) < 250


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1e-15, 1e-9, 1.0, 1e15, 1e25])
@pytest.mark.parametrize("clip", [LEAST_CLIP, 1.0, MOST_CLIP])
def test_no_vector_is_longer_than_the_clip_in_single_precision(size, clip):
    """Of very small numbers the squares vanish, so that their norm seems to be nothing."""
    privacy = sfvi.UnitPrivacy(clip=clip, noise_multiplier=1.0)
    found = summand(privacy, jnp.full(5, size, jnp.float32))
    length = np.linalg.norm(np.asarray(found.high) * 2.0**16 + np.asarray(found.low))
    assert length <= SPREAD * (1 + 1e-12)  # so many steps of the grid are the clip, with noise 1


@pytest.mark.parametrize("privacy", [sfvi.UnitPrivacy(clip=1.0, epsilon=2.0), sfvi.SiloPrivacy(clip=1.0, epsilon=2.0)])
def test_a_fit_says_what_it_cost(privacy, tmp_path):
    silos = {"a": linear_data(seed=0), "b": linear_data(seed=1)}
    fit = sfvi.fit(linear_model(), silos, key=0, num_rounds=30, algorithm=sfvi.SFVI(privacy=privacy))
    assert 1.99 < fit.privacy.epsilon <= 2.0
    assert fit.privacy.rounds == 30
    assert "(2, 1e-05)-differentially private" in str(fit.privacy)
    fit.save(tmp_path)
    assert sfvi.load(tmp_path, linear_model(), silos).privacy == fit.privacy
    fit.report(tmp_path / "report.html", diagnosis=False)
    assert "differentially private" in (tmp_path / "report.html").read_text()


def test_a_silo_is_protected_as_a_whole_under_both_algorithms():
    """The largest part of a reply without noise is the clip; with noise it has the size that is promised."""
    silos = {"a": linear_data(n=40, seed=0), "b": linear_data(n=40, seed=1)}
    for options in (sfvi.SFVI, functools.partial(sfvi.SFVIAvg, num_local_steps=5)):
        algorithm = options(privacy=sfvi.SiloPrivacy(clip=0.05, noise_multiplier=0.0)).bind(linear_model())
        server = algorithm.server_init(jax.random.key(0), {}, jnp.ones(2))

        @jax.jit
        def size(silo, algorithm=algorithm, server=server):
            broadcast = algorithm.broadcast(jax.random.key(0), server)
            state = algorithm.silo_init(jax.random.key(0), broadcast, silo)
            _, reply, _ = algorithm.silo_step(jax.random.key(0), state, broadcast, silo)
            difference = jax.tree.map(jnp.subtract, reply, algorithm.silent(broadcast))
            return jnp.linalg.norm(ravel_pytree(difference)[0])

        for name, values in silos.items():
            np.testing.assert_allclose(size(linear_model().silo_data(name, values)), 0.05, rtol=1e-9)


@pytest.mark.parametrize(
    ("silo", "says"),
    [
        (models.centred_silo, "not a sum over its units"),
        (models.outside_silo, "the site 'total' belongs to no unit"),
        (models.subsampled_silo, "subsamples plate 'rows'"),
    ],
)
def test_programs_whose_units_cannot_be_protected_are_refused(silo, says):
    with pytest.raises(OptionError, match=says):
        sfvi.fit(
            models.model(silo),
            {"a": models.rows_data(), "b": models.rows_data(seed=1)},
            key=0,
            num_rounds=2,
            algorithm=sfvi.SFVI(privacy=SEEN),
        )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: sfvi.UnitPrivacy(clip=0, epsilon=1.0), "clip is 0"),
        (lambda: sfvi.UnitPrivacy(clip=1.0), "one of epsilon and noise_multiplier"),
        (lambda: sfvi.UnitPrivacy(clip=1.0, epsilon=1.0, noise_multiplier=1.0), "one of epsilon"),
        (lambda: sfvi.UnitPrivacy(clip=1.0, epsilon=-1.0), "epsilon is -1.0"),
        (lambda: sfvi.UnitPrivacy(clip=math.inf, epsilon=1.0), "clip is inf"),
        (lambda: sfvi.UnitPrivacy(clip=1e-22, epsilon=1.0), "clip is 1e-22; give a number between 1e-09 and 1e"),
        (lambda: sfvi.UnitPrivacy(clip=1.0, noise_multiplier=1e-160), "noise_multiplier is 1e-160"),
        (lambda: sfvi.UnitPrivacy(clip=1.0, epsilon=1.0, shared_by=0), "shared_by is 0"),
        (lambda: sfvi.UnitPrivacy(clip=1.0, epsilon=1.0, delta=0), "delta is 0"),
        (lambda: sfvi.UnitPrivacy(clip=1.0, epsilon=1.0, delta=0.1), "delta is 0.1"),
        (lambda: sfvi.UnitPrivacy(clip=1.0, epsilon=1.0, sampling_rate=2), "sampling_rate is 2"),
        (lambda: sfvi.UnitPrivacy(clip=1.0, epsilon=1.0, sampling_rate=1e-7), "sampling_rate is 1e-07"),
        (lambda: sfvi.SFVI(privacy=1.0), "privacy is 1.0"),
        (lambda: sfvi.SFVI(privacy=SEEN, fast_start=sfvi.FastStart()), "fast_start sends replies without noise"),
        (lambda: sfvi.SFVI(privacy=SEEN, fixed_noise=sfvi.FixedNoise()), "fixed_noise sends replies without noise"),
        (lambda: sfvi.SFVI(privacy=SEEN, bound=sfvi.bounds.importance_weighted(3)), "use bounds.elbo"),
        (lambda: sfvi.SFVIAvg(num_local_steps=2, privacy=SEEN), "protected under SFVI only"),
        (lambda: sfvi.Sites(privacy=SEEN), "privacy is not there"),
    ],
)
def test_options_that_mean_nothing_are_refused(make, says):
    with pytest.raises(OptionError, match=says):
        make()


def test_a_stopping_rule_would_look_at_what_has_no_noise():
    with pytest.raises(OptionError, match="leave until_converged out"):
        sfvi.fit(linear_model(), {"a": linear_data()}, key=0, until_converged=True, algorithm=sfvi.SFVI(privacy=SEEN))


def test_noise_cannot_be_shared_by_more_silos_than_there_are():
    privacy = sfvi.UnitPrivacy(clip=1.0, epsilon=1.0, shared_by=3)
    with pytest.raises(OptionError, match="shared_by is 3, but there are 1 silos"):
        sfvi.fit(linear_model(), {"a": linear_data()}, key=0, num_rounds=2, algorithm=sfvi.SFVI(privacy=privacy))


def test_latents_of_a_silo_do_not_learn_under_a_share_of_the_noise():
    """They stay in the silo, where nobody else's noise comes; later replies tell of them."""
    privacy = sfvi.UnitPrivacy(clip=1.0, epsilon=1.0, shared_by=2)
    silos = {"a": models.rows_data(), "b": models.rows_data(seed=1)}
    model, algorithm = models.model(models.rows_silo), sfvi.SFVI(privacy=privacy)
    with pytest.raises(OptionError, match="shared_by is for models without latents of a silo's own"):
        sfvi.fit(model, silos, key=0, num_rounds=2, algorithm=algorithm)


def test_a_unit_that_breaks_is_not_heard_of():
    """Its step is not taken, its part is nothing: whether numbers are finite would tell of its data."""
    data = linear_data(n=6)
    data["y"][2] = 1e200
    privacy = sfvi.UnitPrivacy(clip=1.0, noise_multiplier=1.0)
    algorithm = sfvi.SFVI(privacy=privacy, optimizer=optax.sgd(1e-3), local_optimizer=optax.adam(0.1))
    with jax.debug_nans(False):
        model = linear_model()
        bound = algorithm.bind(model)
        silo = take_apart(model, "a", model.silo_data("a", linear_data(n=6)), {})
        values = {name: jnp.asarray(v) for name, v in zip(silo.values, jax.tree.leaves(data), strict=True)}
        broken = dataclasses.replace(silo, values=values)
        server = bound.server_init(jax.random.key(0), {}, jnp.ones(1))
        broadcast = bound.broadcast(jax.random.key(0), server)
        state = bound.silo_init(jax.random.key(0), broadcast, broken)
        after = bound.silo_step(jax.random.key(1), state, broadcast, broken)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


@pytest.mark.parametrize("double", [True, False])
def test_with_noise_too_a_unit_more_changes_a_sum_by_its_own_part_only(double):
    """The 65th unit is computed apart from the others; their sum and its noise stay the same to the digit."""
    with jax.enable_x64(double):
        model = models.model(models.rows_silo)
        algorithm = sfvi.SFVI(privacy=PRIVATE, bound=sfvi.bounds.elbo()).bind(model)
        server = algorithm.server_init(jax.random.key(0), {}, jnp.ones(1))
        broadcast, whole = algorithm.broadcast(jax.random.key(0), server), models.rows_data(n=AT_ONCE + 1)
        replies = []
        for size in (AT_ONCE, AT_ONCE + 1):
            data = {name: values[:size] for name, values in whole.items()}
            silo = take_apart(model, "a", model.silo_data("a", data), {})
            state = algorithm.silo_init(jax.random.key(0), broadcast, silo)
            reply = algorithm.silo_step(jax.random.key(1), state, broadcast, silo)[1]
            replies.append(Measure(broadcast.shared, None).into((reply.gradient, None)))
        change = replies[1] - replies[0]
    assert 0.01 < np.linalg.norm(change) <= PRIVATE.clip * (1 + 1e-4)


@pytest.mark.parametrize("outlier", [0, 5])
def test_whoever_comes_first_is_no_more_exposed_than_others(outlier):
    """A silo's own latents have a part without units, which holds no number of anybody's."""

    def population():
        return numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("slope", dist.Normal(0, 1))

    def silo(globals_, data):
        ours = numpyro.sample("ours", dist.Normal(0, 1))
        with numpyro.plate("rows", data["x"].shape[0]):
            rate = jnp.exp(globals_[0] + ours + globals_[1] * data["x"])
            numpyro.sample("y", dist.Poisson(rate), obs=data["y"])

    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=10), "y": rng.poisson(1.0, size=10)}
    data["x"][outlier] = 1000.0
    model = sfvi.StructuredModel(population, silo)
    algorithm = sfvi.SFVI(privacy=PRIVATE, bound=sfvi.bounds.elbo()).bind(model)
    held = take_apart(model, "a", model.silo_data("a", data), {})
    key = jax.random.key(0)
    broadcast = algorithm.broadcast(key, algorithm.server_init(key, {}, jnp.ones(1)))
    family = dataclasses.replace(broadcast.shared.family, loc=jnp.array([0.0, 3.0]))  # exp overflows for the outlier
    broadcast = broadcast._replace(shared=broadcast.shared._replace(family=family))
    state = algorithm.silo_init(key, broadcast, held)
    reply = algorithm.silo_step(key, state, broadcast, held)[1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(reply.gradient))


@pytest.mark.parametrize("first", [None, sfvi.UnitPrivacy(clip=0.5, noise_multiplier=0.1)])
def test_a_run_does_not_go_on_with_other_noise(first, tmp_path):
    """What left before would not be in the epsilon that it tells."""

    class StopError(Exception):
        pass

    def stop(progress):
        raise StopError

    model, silos = linear_model(), {"a": linear_data()}
    options = {"key": 0, "num_rounds": 30, "checkpoint": tmp_path / "run.npz", "checkpoint_every": 0.0}
    common = {"optimizer": optax.adam(0.01)}
    with pytest.raises(StopError):
        sfvi.fit(model, silos, algorithm=sfvi.SFVI(privacy=first, **common), callback=stop, **options)
    with pytest.raises(sfvi.ArchiveError, match="algorithm or option of it"):
        sfvi.fit(model, silos, algorithm=sfvi.SFVI(privacy=PRIVATE, **common), **options)


@pytest.mark.parametrize("family", [None, sfvi.families.full()])
@pytest.mark.parametrize("units", [False, True])
def test_a_model_without_global_latents_has_noise_too(units, family):
    def silo(nothing, data):
        mu = numpyro.param("mu", 0.5)
        with numpyro.plate("rows", len(data["y"])):
            mean = numpyro.sample("b", dist.Normal(mu, 1.0)) if units else mu
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=data["y"])

    data = {"a": {"y": np.arange(5.0)}}
    private = sfvi.SFVI(privacy=sfvi.UnitPrivacy(clip=0.5, noise_multiplier=0.1), global_family=family)
    fit = sfvi.fit(sfvi.StructuredModel(lambda: None, silo), data, key=0, num_rounds=5, algorithm=private)
    assert np.isfinite(float(fit.theta["mu"]))
    assert float(fit.theta["mu"]) != 0.5


def test_what_a_start_knows_is_not_passed_off_as_private():
    model, silos = linear_model(), {"a": linear_data()}
    plain = sfvi.fit(model, silos, key=0, num_rounds=2)
    with pytest.raises(OptionError, match="start: what that fit learned"):
        sfvi.fit(model, silos, key=0, num_rounds=2, start=plain, algorithm=sfvi.SFVI(privacy=PRIVATE))
