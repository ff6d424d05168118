"""Partial participation: who takes part, with which weight, and what becomes of the others."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sfvi
from sfvi import families, participation
from sfvi.algorithms.participation import Participants
from sfvi.engines import loop

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


def test_a_silo_present_with_probability_zero_is_named_as_the_reason():
    rule = participation.rule(lambda key, number, n: (jnp.ones(n, bool), jnp.where(number > 1, 0.0, 1.0)))
    with pytest.raises(sfvi.OptionError, match="round 2 with probability 0"):
        sfvi.fit(linear_model(), SILOS, key=0, num_rounds=5, algorithm=sfvi.SFVI(participation=rule))
