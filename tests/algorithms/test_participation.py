"""Partial participation: who takes part, with which weight, and what becomes of the others."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sfvi
from sfvi import families, participation
from sfvi.algorithms.participation import Participants
from sfvi.engines import batching, logbook, loop

from ..helpers import (
    ASCENT,
    assert_trees_close,
    bind,
    everyone,
    linear_data,
    linear_model,
    linear_posterior,
    run_batched,
    run_one_by_one,
    unit_numbers,
)

KEY = jax.random.key(11)
SILOS = {f"s{j}": linear_data(n, seed=j) for j, n in enumerate([4, 4, 4, 4])}


def first_replies(algorithm, data, theta):
    server_key, silo_key = loop.keys(KEY)
    server = algorithm.server_init(server_key, theta, unit_numbers(data))
    broadcast = algorithm.broadcast(server_key, server)
    step = jax.jit(algorithm.silo_step)
    replies = [
        step(silo_key, algorithm.silo_init(silo_key, broadcast, silo), broadcast, silo)[1] for silo in data.values()
    ]
    return server, broadcast, jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_average_over_all_subsets_is_full_participation(size):
    """The steps of exactly the weighted gradient, averaged over who takes part, are the step of everyone."""
    algorithm, data, theta = bind(linear_model(), SILOS, optimizer=ASCENT)
    server, broadcast, replies = first_replies(algorithm, data, theta)
    step = jax.jit(algorithm.server_step)
    expected = step(server, broadcast, replies, everyone(4))[0].shared
    results = []
    for subset in itertools.combinations(range(4), size):
        index = jnp.array(subset)
        some = jax.tree.map(lambda leaf, i=index: leaf[i], replies)
        results.append(step(server, broadcast, some, Participants(index, jnp.full(size, 4 / size)))[0].shared)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *results)
    assert_trees_close(mean, expected)


def test_unequal_probabilities_are_unbiased_too():
    """Each silo comes by its own coin: weights 1 / pi_j make the average over all outcomes exact."""
    chances = np.array([0.2, 0.5, 0.9, 0.7])
    algorithm, data, theta = bind(linear_model(), SILOS, optimizer=ASCENT)
    server, broadcast, replies = first_replies(algorithm, data, theta)
    step = jax.jit(algorithm.server_step)
    expected = step(server, broadcast, replies, everyone(4))[0].shared
    total = jax.tree.map(jnp.zeros_like, expected)
    for present in itertools.product([False, True], repeat=4):
        present = np.array(present)
        probability = np.prod(np.where(present, chances, 1 - chances))
        rule = participation.rule(lambda key, number, num_silos, p=present: (jnp.asarray(p), jnp.asarray(chances)))
        drawn = rule.draw(KEY, jnp.asarray(0), 4)
        after = step(server, broadcast, replies, drawn)[0].shared
        total = jax.tree.map(lambda t, a, p=probability: t + p * a, total, after)
    assert_trees_close(total, expected)


@settings(max_examples=20)
@given(num_silos=st.integers(1, 12), share=st.floats(0.01, 1.0), round=st.integers(0, 1000))
def test_fractions_draw_without_replacement(num_silos, share, round):
    drawn = participation.fraction(share).draw(KEY, jnp.asarray(round), num_silos)
    size = max(1, int(np.floor(share * num_silos + 0.5)))
    assert len(drawn.index) == size == len(set(np.asarray(drawn.index).tolist()))
    assert set(np.asarray(drawn.index).tolist()) <= set(range(num_silos))
    np.testing.assert_allclose(drawn.weight, num_silos / size)


def test_inclusion_is_equally_frequent():
    rule = participation.count(3)
    drawn = jax.vmap(lambda r: rule.draw(KEY, r, 10).index)(jnp.arange(4000))
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=10)
    np.testing.assert_allclose(counts, 1200, atol=4 * np.sqrt(4000 * 0.3 * 0.7))


def coin(key, round, num_silos):
    chances = jnp.linspace(0.4, 0.9, num_silos)
    present = jax.random.uniform(key, (num_silos,)) < chances
    return present.at[0].set(True), chances.at[0].set(1.0)


RULES = {
    "count": participation.count(2),
    "fraction": participation.fraction(0.75),
    "rule": participation.rule(coin),
}
ALGORITHMS = {
    "SFVI": (sfvi.SFVI, {}),
    "SFVIAvg": (
        sfvi.SFVIAvg,
        {"num_local_steps": 3, "refit_steps": 0, "weights": "units", "global_family": families.mean_field()},
    ),
}


@pytest.mark.parametrize(
    ("name", "rule"), [("SFVI", "count"), ("SFVI", "rule"), ("SFVIAvg", "fraction"), ("SFVIAvg", "rule")]
)
def test_together_as_one_by_one(name, rule):
    """Batches, of different shapes, in which some are absent give what calling only those present gives."""
    kind, options = ALGORITHMS[name]
    silos = SILOS | {"big": linear_data(20, seed=7)}
    model = linear_model()
    algorithm, data, theta = bind(
        model, silos, algorithm=kind, participation=RULES[rule], optimizer=optax.adam(0.05), **options
    )
    server, locals_ = run_one_by_one(algorithm, data, theta, KEY, 5)
    batched, families_, batches = run_batched(model, algorithm, data, theta, KEY, 5, merge=algorithm.additive)
    assert len(batches) > 1
    assert_trees_close((batched.shared, families_), (server.shared, locals_), rtol=1e-8, atol=1e-8)


def test_absent_silos_keep_their_state():
    algorithm, data, theta = bind(linear_model(), SILOS, participation=participation.count(1))
    _, families_, _ = run_batched(linear_model(), algorithm, data, theta, KEY, 1, merge=False)
    present = int(algorithm.participants(loop.keys(KEY)[0], algorithm.server_init(KEY, theta, jnp.ones(4))).index[0])
    for position, (name, silo) in enumerate(data.items()):
        start = algorithm.elbo.start_local(silo)
        moved = any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (families_[name], start)), strict=True))
        assert moved == (position == present)


def test_if_nobody_comes_an_average_stays():
    nobody = participation.rule(lambda key, number, num_silos: (jnp.zeros(num_silos, bool), 0.5))
    algorithm, data, theta = bind(
        linear_model(),
        SILOS,
        algorithm=sfvi.SFVIAvg,
        num_local_steps=2,
        refit_steps=0,
        participation=nobody,
        global_family=families.mean_field(),
    )
    server, _, _ = run_batched(linear_model(), algorithm, data, theta, KEY, 2, merge=False)
    start = algorithm.server_init(loop.keys(KEY)[0], theta, unit_numbers(data))
    assert_trees_close(server.shared, start.shared)
    assert int(server.round) == 2


def test_the_result_says_who_took_part_and_repeats_itself(tmp_path):
    def fit():
        return sfvi.fit(
            linear_model(), SILOS, key=3, num_rounds=12, algorithm=sfvi.SFVI(participation=participation.fraction(0.5))
        )

    one, two = fit(), fit()
    np.testing.assert_array_equal(one.elbo, two.elbo)
    assert list(one.participation.columns) == list(SILOS)
    assert one.participation.shape == (12, 4)
    assert (one.participation.sum(axis=1) == 2).all()
    assert one.participation.equals(two.participation)
    assert one.participation.nunique().max() == 2
    one.save(tmp_path)
    assert sfvi.load(tmp_path, linear_model(), {}).participation.equals(one.participation)
    everyone_ = sfvi.fit(linear_model(), SILOS, key=3, num_rounds=2)
    assert everyone_.participation.to_numpy().all()


def test_half_of_the_silos_reach_the_posterior():
    whole = linear_data(n=24)
    silos = {f"s{j}": {k: v[6 * j : 6 * j + 6] for k, v in whole.items()} for j in range(4)}
    exact = linear_posterior(whole)
    algorithm = sfvi.SFVI(
        participation=participation.count(2),
        optimizer=optax.adam(optax.cosine_decay_schedule(0.02, 6000)),
        global_family=sfvi.families.full(),
    )
    fit = sfvi.fit(linear_model(), silos, key=0, num_rounds=6000, algorithm=algorithm)
    mean, sd = fit.posterior.family.marginals()
    expected = np.sqrt(np.diag(exact.covariance)[:2])
    np.testing.assert_allclose((mean - exact.mean[:2]) / expected, 0.0, atol=0.15)
    np.testing.assert_allclose(sd / expected, 1.0, atol=0.1)


BAD = [
    (lambda: participation.count(0), "count: number is 0"),
    (lambda: participation.fraction(1.5), "fraction: share is 1.5"),
    (lambda: participation.rule(3), "is not a function"),
    (lambda: sfvi.SFVI(participation=0.5), "participation is 0.5"),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_bad_options(make, words):
    with pytest.raises(sfvi.OptionError, match=words):
        make()


def test_bad_rules_are_refused_before_any_round():
    calls = []
    for rule, words in [
        (participation.count(9), "more than the 4 silos"),
        (participation.rule(lambda key, number: None), "participation rule fails"),
        (participation.rule(lambda key, number, n: jnp.ones(n)), "two arrays"),
        (participation.rule(lambda key, number, n: (jnp.ones(n), jnp.ones(n))), "4 booleans"),
    ]:
        with pytest.raises(sfvi.OptionError, match=words):
            sfvi.fit(
                linear_model(),
                SILOS,
                key=0,
                num_rounds=2,
                algorithm=sfvi.SFVI(participation=rule),
                callback=calls.append,
            )
    assert not calls


def all_with(probability):
    return participation.rule(lambda key, number, n: (jnp.ones(n, bool), jnp.asarray(probability)))


@pytest.mark.parametrize("probability", [0.0, -1.0, 2.0, float("nan"), [0.5, 0.5, -0.5, 0.5]])
def test_impossible_probabilities_are_refused_before_any_round(probability):
    calls = []
    silo = "s2" if isinstance(probability, list) else "s0"
    with pytest.raises(sfvi.OptionError, match=rf"silo '{silo}' take part in round 0 with .* not in \(0, 1\]"):
        sfvi.fit(
            linear_model(),
            SILOS,
            key=0,
            num_rounds=5,
            algorithm=sfvi.SFVI(participation=all_with(probability)),
            callback=calls.append,
        )
    assert not calls


def test_possible_probabilities_are_weights():
    assert np.all(all_with(1).draw(KEY, jnp.asarray(0), 4).weight == 1.0)
    np.testing.assert_allclose(
        all_with(np.float32(1) + np.float32(1e-7)).draw(KEY, jnp.asarray(0), 4).weight, 1.0, rtol=1e-6
    )
    nobody = participation.rule(lambda key, number, n: (jnp.zeros(n, bool), 0.0))
    assert np.all(nobody.draw(KEY, jnp.asarray(0), 4).weight == 0.0)


def test_an_impossible_probability_that_comes_late_stops_the_run():
    rule = participation.rule(lambda key, number, n: (jnp.ones(n, bool), jnp.where(number > 110, 2.0, 1.0)))
    with pytest.raises(sfvi.OptionError, match=r"silo 's0' take part in round 111 with .* not in \(0, 1\]"):
        sfvi.fit(linear_model(), SILOS, key=0, num_rounds=150, algorithm=sfvi.SFVI(participation=rule))


def test_rules_that_do_not_repeat_themselves_are_refused():
    generator = np.random.default_rng(0)
    rule = participation.rule(lambda key, number, n: (generator.uniform(size=n) < 0.5, 0.5))
    with pytest.raises(sfvi.OptionError, match="two answers for round"):
        sfvi.fit(linear_model(), SILOS, key=0, num_rounds=20, algorithm=sfvi.SFVI(participation=rule))


def test_only_the_first_line_of_a_rules_own_error_is_told():
    def fails(key, number, num_silos):
        raise RuntimeError("no quorum.\nA second line.")

    with pytest.raises(sfvi.OptionError, match=r"fails \(RuntimeError: no quorum\); it takes") as caught:
        sfvi.fit(linear_model(), SILOS, key=0, algorithm=sfvi.SFVI(participation=participation.rule(fails)))
    assert "second line" not in str(caught.value)


@pytest.mark.parametrize("weights", ["uniform", "units"])
def test_an_average_weights_silos_by_their_probabilities(weights):
    """By hand: of independent Gaussians the barycenter has the mean of the means and the mean of the sds."""
    silos = {"a": linear_data(4), "b": linear_data(2, seed=1), "c": linear_data(7, seed=2)}
    algorithm, data, theta = bind(
        linear_model(),
        silos,
        algorithm=sfvi.SFVIAvg,
        num_local_steps=3,
        weights=weights,
        optimizer=optax.adam(0.2),
        global_family=families.mean_field(),
    )
    server, broadcast, replies = first_replies(algorithm, data, theta)
    came = jnp.array([0, 2])
    replies = jax.tree.map(lambda leaf: leaf[came], replies)
    after, _ = jax.jit(algorithm.server_step)(server, broadcast, replies, Participants(came, jnp.array([5.0, 1.25])))
    share = np.array([5.0, 1.25]) * (np.array([4.0, 7.0]) if weights == "units" else 1.0)
    share /= share.sum()
    family = replies.shared.family
    np.testing.assert_allclose(after.shared.family.loc, share @ family.loc, rtol=1e-9)
    np.testing.assert_allclose(np.exp(after.shared.family.log_scale), share @ np.exp(family.log_scale), rtol=1e-9)
    assert np.ptp(np.asarray(family.loc), axis=0).min() > 1e-3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_elbo_of_a_round_weights_those_who_came(name):
    kind, options = ALGORITHMS[name]
    chances = jnp.array([0.25, 0.5, 0.8, 0.4])
    rule = participation.rule(lambda key, number, n: (jnp.array([True, False, True, True]), chances))
    model = linear_model()
    algorithm, data, theta = bind(model, SILOS, algorithm=kind, participation=rule, **options)
    server_key, silo_key = loop.keys(KEY)
    batches = batching.plan(model, data, theta, merge=False)
    rounds = loop.build(algorithm, batches, {name: silo.num_units for name, silo in data.items()})
    state = rounds.init(KEY, theta)
    elbo = rounds.run(KEY, state, jnp.asarray(1)).trace["elbo"][0]

    broadcast = algorithm.broadcast(server_key, state.server)
    step = jax.jit(algorithm.silo_step)
    terms = [
        step(silo_key, algorithm.silo_init(silo_key, broadcast, silo), broadcast, silo)[2].elbo_term
        for silo in data.values()
    ]
    replies = first_replies(algorithm, data, theta)[2]
    info = jax.jit(algorithm.server_step)(state.server, broadcast, replies, everyone(4))[1]
    expected = info.elbo_term + terms[0] / 0.25 + terms[2] / 0.8 + terms[3] / 0.4
    np.testing.assert_allclose(elbo, expected, rtol=1e-10)


def sharp_model():
    """Observations so exact that a round with somebody has an ELBO thousands of times that of one with nobody."""

    def population():
        return numpyro.sample("mu", dist.Normal(0.0, 1.0))

    def silo(mu, data):
        with numpyro.plate("units", data["y"].shape[0]):
            numpyro.sample("y", dist.Normal(mu, 0.1), obs=data["y"])

    return sfvi.StructuredModel(population, silo)


@pytest.mark.parametrize("kind", [sfvi.SFVI, lambda **o: sfvi.SFVIAvg(num_local_steps=20, refit_steps=0, **o)])
def test_a_first_round_with_nobody_is_no_measure_of_divergence(kind):
    silos = {f"s{j}": {"y": np.random.default_rng(j).normal(0.5, 0.1, 300)} for j in range(4)}
    late = participation.rule(lambda key, number, n: (jnp.full(n, number > 0), 1.0))
    fit = sfvi.fit(sharp_model(), silos, key=0, num_rounds=200, algorithm=kind(participation=late))
    assert fit.elbo[0] - fit.elbo[1] > 1000 * (1 + abs(fit.elbo[0]))
    np.testing.assert_allclose(fit.posterior.family.center, 0.5, atol=0.05)


@pytest.mark.parametrize("partial", [False, True])
def test_what_counts_as_divergence(partial):
    """With everybody the first round is the measure, else the worst of the first twenty, once they are over."""

    def broken(before, elbo):
        history = logbook.History({"elbo": np.asarray(before, float)}, *[np.zeros(0)] * 3)
        log = logbook.Logbook(history, 1000, None, steps_per_round=1, partial=partial)
        return log.runs_away(np.asarray(elbo, float))

    assert broken([], [-1.0, np.nan])
    assert broken([-1.0], [-1e6] * 15) is not partial
    assert broken([-1.0], [-1e6] * 40) is not partial
    assert broken([-1.0] * 30, [-1e6] * 40)
    assert broken([-1.0] * 30, [-1e6]) is not partial
    assert not broken([-1.0] * 30, [-1.5] * 40)
