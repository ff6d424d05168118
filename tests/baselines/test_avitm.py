"""ProdLDA as it was published: its loss and its predictions, by NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfvi import topics
from sfvi.baselines import Avitm, avitm
from sfvi.baselines.avitm import EPSILON, MOMENTUM, _Pass, _start, loss
from sfvi.data.text import dense
from sfvi.errors import DataError, OptionError

NUM_WORDS = 30
SETTINGS = Avitm(num_topics=3, num_hidden=8, keep=0.5, alpha=0.7, batch_size=20, epochs=3)


def documents(number, seed=0):
    """Three topics of ten words each."""
    generator = np.random.default_rng(seed)
    main = generator.integers(3, size=number)
    odds = np.where(np.arange(NUM_WORDS) // 10 == main[:, None], 0.09, 0.005)
    counts = generator.multinomial(25, odds / odds.sum(1, keepdims=True)).astype(np.uint16)
    return {"words": np.tile(np.arange(NUM_WORDS, dtype=np.uint16), (number, 1)), "counts": counts}


BAG = documents(60)
SHAPES = {"hidden": (20, 8), "weights": (20, 3)}


def softplus(values):
    return np.logaddexp(0.0, values)


def linear(layer, values):
    return values @ np.asarray(layer.weight).T + np.asarray(layer.bias)


def shares(values):
    odds = np.exp(values - values.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def test_the_loss_is_the_formula():
    """With the same dropout and noise: batch normalization, KL to the Laplace approximation, likelihood."""
    network, moments = _start(jax.random.key(0), SETTINGS, NUM_WORDS)
    shifts = {name: jax.random.normal(jax.random.key(1), shift.shape) for name, shift in network.shifts.items()}
    network = eqx.tree_at(lambda network: network.shifts, network, shifts)
    counts, key = jnp.asarray(dense(BAG, NUM_WORDS)[:20]), jax.random.key(2)
    found, after = loss(SETTINGS, network, moments, counts, key)

    keys = _Pass(network, SETTINGS.keep, key, moments).keys
    kept = {name: np.asarray(jax.random.bernoulli(keys[name], 0.5, shape)) / 0.5 for name, shape in SHAPES.items()}
    seen = {}

    def normalized(name, values):
        seen[name] = values
        return (values - values.mean(0)) / np.sqrt(values.var(0) + EPSILON) + np.asarray(shifts[name])

    hidden = kept["hidden"] * softplus(linear(network.second, softplus(linear(network.first, np.asarray(counts)))))
    loc = normalized("loc", linear(network.loc, hidden))
    log_var = normalized("log_var", linear(network.log_var, hidden))
    h = loc + np.exp(log_var / 2) * np.asarray(jax.random.normal(keys["noise"], loc.shape))
    odds = shares(normalized("scores", (kept["weights"] * shares(h)) @ np.asarray(network.topics)))
    variance = (1 - 1 / 3) / 0.7
    divergence = 0.5 * (np.exp(log_var) / variance + loc**2 / variance - 1 - log_var + np.log(variance)).sum(1)
    expected = np.mean(divergence - (np.asarray(counts) * np.log(odds)).sum(1))
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    for name, values in seen.items():
        np.testing.assert_allclose(after[name].mean, (1 - MOMENTUM) * values.mean(0), atol=1e-12)
        np.testing.assert_allclose(after[name].var, MOMENTUM + (1 - MOMENTUM) * values.var(0), rtol=1e-9)


def test_predictions_are_the_formula_and_of_each_document_by_itself():
    """Running moments, no dropout, h at its mean."""
    fit = avitm(BAG, SETTINGS, key=0, num_words=NUM_WORDS)

    def normalized(name, values):
        at = fit.moments[name]
        return (values - np.asarray(at.mean)) / np.sqrt(np.asarray(at.var) + EPSILON) + np.asarray(
            fit.network.shifts[name]
        )

    net = fit.network
    hidden = softplus(linear(net.second, softplus(linear(net.first, dense(BAG, NUM_WORDS)))))
    odds = shares(normalized("scores", shares(normalized("loc", linear(net.loc, hidden))) @ fit.topics))
    found = fit.log_probabilities(BAG)
    np.testing.assert_allclose(found, np.log(odds), rtol=1e-7, atol=1e-9)
    alone = fit.log_probabilities({part: values[5:6] for part, values in BAG.items()})
    np.testing.assert_allclose(alone, found[5:6], rtol=1e-9)


def test_topics_that_are_known_are_found(float32):
    settings = Avitm(num_topics=3, keep=0.8, batch_size=50, epochs=60, step_size=0.01, momentum=0.9)
    fit = avitm(documents(400), settings, key=0, num_words=NUM_WORDS)
    best = {int(np.bincount(row // 10).argmax()) for row in topics.top_words(fit.topics, top=10)}
    assert best == {0, 1, 2}
    later = documents(100, seed=1)
    logs = (dense(later, NUM_WORDS) * fit.log_probabilities(later)).sum(1)
    assert topics.perplexity(logs, later) < 0.7 * NUM_WORDS


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"batch_size": 1}, "batch_size is 1; give a whole number of at least 2"),
        ({"alpha": 0.0}, "alpha is 0.0; give a number above 0"),
        ({"momentum": 1.0}, "momentum is 1.0; give a number above 0 and below 1"),
        ({"step_size": -1.0}, "step_size is -1.0"),
        ({"keep": 1e-9}, "keep is 1e-09"),
        ({"keep": True}, "keep is True"),
    ],
)
def test_wrong_settings_are_refused(chosen, says):
    with pytest.raises(OptionError, match=f"Avitm: {says}"):
        Avitm(**chosen)


def test_what_cannot_be_fitted_is_said():
    one = {part: values[:1] for part, values in BAG.items()}
    with pytest.raises(DataError, match="at least two documents"):
        avitm(one, SETTINGS, key=0, num_words=NUM_WORDS)
    with pytest.raises(DataError, match="word number 29, but num_words is 20"):
        avitm(BAG, SETTINGS, key=0, num_words=20)
    fit = avitm(BAG, SETTINGS, key=0, num_words=NUM_WORDS)
    with pytest.raises(DataError, match="counts hold numbers that are negative"):
        fit.log_probabilities(BAG | {"counts": BAG["counts"].astype(int) - 1})
