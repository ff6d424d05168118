"""An attacker who knows everything but one thing: whether a given unit is in the data.

It knows the model, the broadcasts, all other units, and puts in a canary of its choice. It sees all replies, and
decides by the likelihood ratio. From how often it is right follows a lower bound on epsilon, which must not exceed what
is claimed; and it comes near enough that noise of half the size would be found out.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import beta

import sfvi
from sfvi.accountant import Releases, spent
from sfvi.algorithms import unit_privacy
from sfvi.algorithms.grid import HALF, SPREAD
from sfvi.algorithms.measure import Measure
from sfvi.engines.units import take_apart

from ..helpers import linear_data, linear_model

TRIALS, ROUNDS, CLIP, DELTA = 60_000, 8, 0.5, 1e-3
LEAST = 1e-3  # false alarms of a threshold, of which enough trials tell


def scores(noise_multiplier, sampling_rate, *, present):
    """The log likelihood ratio of each trial's replies, with or without the canary."""
    model, key = linear_model(), jax.random.key(0)
    privacy = sfvi.UnitPrivacy(clip=CLIP, noise_multiplier=noise_multiplier, sampling_rate=sampling_rate)
    algorithm = sfvi.SFVI(privacy=privacy, optimizer=optax.sgd(0.01), bound=sfvi.bounds.elbo()).bind(model)
    data = linear_data(n=5)
    data["y"][-1] += 50.0  # the canary: as far away as the clip lets it be
    others = {name: values[:-1] for name, values in data.items()}
    with_canary, without = (take_apart(model, "a", model.silo_data("a", d), {}) for d in (data, others))
    silo = with_canary if present else without
    server = algorithm.server_init(key, {}, jnp.ones(1))
    everybody = dataclasses.replace(privacy, sampling_rate=1.0)
    known = sfvi.SFVI(privacy=everybody, optimizer=optax.sgd(0.01), bound=sfvi.bounds.elbo()).bind(model)

    units = Measure(algorithm.broadcast(key, server).shared, None)

    def replies_of(algorithm, key, silo):
        """Of all rounds, at broadcasts that stay the same but for their noise."""

        def one(state, number):
            broadcast = algorithm.broadcast(jax.random.key(0), server._replace(round=number))
            state, reply, _ = algorithm.silo_step(key, state, broadcast, silo)
            return state, units.into((reply.gradient, None))

        start = algorithm.silo_init(key, algorithm.broadcast(jax.random.key(0), server), silo)
        return jax.lax.scan(one, start, jnp.arange(ROUNDS, dtype=jnp.int32))[1]

    @jax.jit
    def all_scores():
        secrets = jax.random.split(jax.random.key(1 + present), TRIALS)
        replies = jax.vmap(lambda secret: replies_of(algorithm, secret, silo))(secrets)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unit_privacy, "noisy", lambda privacy, secret, total, dtype: _numbers(privacy, total, dtype))
            rest = replies_of(known, key, without)
            added = replies_of(known, key, with_canary) - rest  # what the canary adds, as the attacker computes it
        scale = noise_multiplier * CLIP / sampling_rate
        # the others' draws blur the sum too; the attacker takes them at their mean, and the canary's direction
        direction = added / jnp.linalg.norm(added, axis=1, keepdims=True)
        along = jnp.sum((replies - rest) * direction, axis=-1) / scale
        shift = jnp.linalg.norm(added, axis=1) / sampling_rate / scale
        ratio = jnp.log1p(-sampling_rate + sampling_rate * jnp.exp(along * shift - shift**2 / 2))
        return jnp.sum(ratio, axis=1)

    return np.asarray(all_scores())


def _numbers(privacy, total, dtype):
    """A sum without noise."""
    return (total.high.astype(dtype) * 2.0**HALF + total.low) * (privacy.noise * privacy.clip / SPREAD)


def lower_bound(out, inside):
    """Epsilon at least, with 99% confidence: the best threshold of one half of the trials, judged by the other."""
    thresholds = np.quantile(np.concatenate([out[::2], inside[::2]]), np.linspace(0.01, 0.99, 99))

    def rates(a, b):
        return np.array([[np.mean(a > t), np.mean(b > t)] for t in thresholds])

    tried = rates(out[::2], inside[::2])
    best = np.argmax(np.log(np.maximum(tried[:, 1] - DELTA, 1e-9)) - np.log(np.maximum(tried[:, 0], LEAST)))
    n = len(out[1::2])
    false, true = np.sum(out[1::2] > thresholds[best]), np.sum(inside[1::2] > thresholds[best])
    most = beta.ppf(0.995, false + 1, n - false)
    least = beta.ppf(0.005, true, n - true + 1) if true else 0.0
    return math.log(max(least - DELTA, 1e-12) / most)


def attack(noise_multiplier, sampling_rate):
    out, inside = (scores(noise_multiplier, sampling_rate, present=present) for present in (False, True))
    return lower_bound(out, inside)


def test_an_attack_finds_less_than_is_claimed():
    claimed = spent([Releases(3.0, 1.0, ROUNDS)], DELTA)
    found = attack(3.0, 1.0)
    assert 0.3 * claimed < found < claimed


def test_noise_of_half_the_size_would_be_found_out():
    """The same attack on a mechanism with half the noise: more than its claim would be."""
    claimed = spent([Releases(3.0, 1.0, ROUNDS)], DELTA)
    assert attack(1.5, 1.0) > claimed


def test_sampling_hides_as_much_as_is_claimed():
    claimed = spent([Releases(1.5, 0.3, ROUNDS)], DELTA)
    assert attack(1.5, 0.3) < claimed
