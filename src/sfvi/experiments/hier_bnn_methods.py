"""The methods of Table 1: each fitted to the same silos, each measured in the same way."""

import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from .. import baselines, scores
from .. import data as datasets
from ..algorithms import AlgorithmOptions
from ..baselines import FedSoul, PFedBayes, ReportedFedSoul, fed_avg, fed_soul, p_fed_bayes
from ..baselines.networks import init_layers, log_likelihood, logits
from ..zoo import hierarchical_bnn
from .base import Result, attempt

WIDTH, NUM_CLASSES, NUM_DRAWS, NUM_PIXELS = 64, 10, 100, 28 * 28
Predict = Callable[[str, np.ndarray], np.ndarray]  # probabilities of a silo's network
Silos = dict[str, dict[str, np.ndarray]]


class Split(NamedTuple):
    """A number of silos, and what depends on it.

    Attributes:
        silos: How many.
        batch: Rows of each in a step.
        local_steps: Of the methods with few rounds, in each round.
        train_rows: At most so many of each to train with; None for all.
        test_rows: To test with.
    """

    silos: int
    batch: int
    local_steps: int
    train_rows: int | None = None
    test_rows: int | None = None


@cache
def images(dataset: str) -> datasets.Images:
    """All images."""
    return getattr(datasets, dataset)()


def partition(dataset: str, split: Split, share: float, seed: int) -> tuple[Silos, Silos]:
    """Training and test images of each silo, split alike, pixels from 0 to 1."""
    found = images(dataset)
    train, test = (
        _silos(x, y, split.silos, share, rows, seed)
        for x, y, rows in (
            (found.train_x, found.train_y, split.train_rows),
            (found.test_x, found.test_y, split.test_rows),
        )
    )
    return train, test


def _silos(x, y, num_silos, share, most, seed):
    positions = datasets.by_label(y, num_silos, share=share, seed=seed)
    if most:
        generator = np.random.default_rng(seed)
        positions = {silo: np.sort(generator.permutation(rows)[:most]) for silo, rows in positions.items()}
    flat = {"x": x.reshape(len(x), -1).astype(np.float32) / 255, "y": y}
    return datasets.take(flat, positions)


def evaluate(predict: Predict, train: Silos, test: Silos) -> Result:
    r"""Scores of each silo's network on its own test images; all but the accuracies are of all images together.

    Off the majority is what a rule that always says a silo's most frequent label gets wrong. A network that knows its
    silo expects that label, $p(y \mid x) \propto \pi_j(y) p(x \mid y)$; "even" has this expectation taken out,
    $p(y \mid x) / \pi_j(y)$ with the silo's own frequencies $\pi_j$.
    """
    accuracies, probabilities, labels, rare, evened = [], [], [], [], []
    for silo, data in test.items():
        found = predict(silo, data["x"])
        accuracies.append(scores.accuracy(found, data["y"]))
        probabilities.append(found)
        labels.append(data["y"])
        counts = np.bincount(train[silo]["y"], minlength=NUM_CLASSES)
        rare.append(data["y"] != counts.argmax())
        shares = np.asarray(found) / (counts + 1)
        evened.append(shares / shares.sum(1, keepdims=True))
    every, truth, off, even = (np.concatenate(part) for part in (probabilities, labels, rare, evened))
    return {
        **scores.classification(every, truth),
        "accuracies": np.round(accuracies, 5).tolist(),
        "off-majority": scores.accuracy(every[off], truth[off]) if off.any() else float("nan"),
        "off-majority, even": scores.accuracy(even[off], truth[off]) if off.any() else float("nan"),
        "confidence": float(every.max(1).mean()),
    }


def federated(make: Callable, algorithm: AlgorithmOptions, rounds: int, load, split: Split, seed: int, state: Path):
    """One of our methods."""
    train, test = load()
    begin = time.perf_counter()
    model = make(batch_size=split.batch)
    found, broke = attempt(model, train, key=seed, num_rounds=rounds, algorithm=algorithm, checkpoint=state)
    seconds = time.perf_counter() - begin

    def predict(silo, x):
        return _probabilities(found, silo, x)

    sent = {column: found.communication[column].to_numpy() for column in found.communication}
    traffic = int(np.sum(sent["rounds"] * (sent["bytes to a silo"] + sent["bytes from a silo"])))
    extra = {"rounds": rounds, "bytes": traffic, "seconds": round(seconds, 1)}
    return evaluate(predict, train, test) | extra | broke


def alone(algorithm: AlgorithmOptions, steps: int, load, split: Split, seed: int, state: Path) -> Result:
    """Every silo by itself: nothing is shared, so that one run fits them all."""
    train, test = load()
    model = baselines.each_alone(hierarchical_bnn(batch_size=split.batch))
    begin = time.perf_counter()
    found, broke = attempt(model, train, key=seed, num_rounds=steps, algorithm=algorithm, checkpoint=state)
    seconds = time.perf_counter() - begin
    scored = evaluate(partial(_probabilities, found), train, test)
    return scored | {"rounds": 0, "seconds": round(seconds, 1)} | broke


def pooled(algorithm: AlgorithmOptions, steps: int, load, split: Split, seed: int, state: Path) -> Result:
    """One network for all rows together."""
    train, test = load()
    together = baselines.pooled(train)
    rows = min(len(together["all"]["y"]), split.silos * split.batch)  # as many as silos together
    model = hierarchical_bnn(batch_size=rows)
    begin = time.perf_counter()
    found, broke = attempt(model, together, key=seed, num_rounds=steps, algorithm=algorithm, checkpoint=state)
    seconds = time.perf_counter() - begin
    scored = evaluate(lambda silo, x: _probabilities(found, "all", x), train, test)
    return scored | {"rounds": 0, "seconds": round(seconds, 1)} | broke


def langevin(settings: FedSoul | ReportedFedSoul, load, split: Split, seed: int, state: Path) -> Result:
    """FedSOUL."""
    del split, state  # it takes minutes
    train, test = load()
    begin = time.perf_counter()
    found = fed_soul(train, settings, key=seed, num_classes=NUM_CLASSES)
    visits = {"never visited": sum(count == 0 for count in found.visits.values())}
    scored = evaluate(found.predict, train, test) | visits
    return scored | {"rounds": settings.num_rounds, "seconds": round(time.perf_counter() - begin, 1)}


def personalized(settings: PFedBayes, load, split: Split, seed: int, state: Path) -> Result:
    """The method pFedBayes."""
    del split, state  # it takes minutes
    train, test = load()
    begin = time.perf_counter()
    found = p_fed_bayes(train, settings, key=seed, num_classes=NUM_CLASSES)
    scored = evaluate(partial(found.predict, num_samples=NUM_DRAWS), train, test)
    return scored | {"rounds": settings.num_rounds, "seconds": round(time.perf_counter() - begin, 1)}


def averaged(
    step_size: float, rounds: int, load, split: Split, seed: int, state: Path, *, informed: bool = False
) -> Result:
    r"""FedAvg of one network for all; informed, a silo multiplies by its own frequencies over those of all silos."""
    del state  # it takes minutes
    train, test = load()
    begin = time.perf_counter()

    def loss(layers, batch):
        return -log_likelihood(logits(layers, batch["x"]), batch["y"]) / len(batch["y"])

    features = next(iter(train.values()))["x"].shape[1]
    start = init_layers(jax.random.key(seed), [features, WIDTH, NUM_CLASSES], biases=False)
    options: dict[str, Any] = {"num_rounds": rounds, "num_local_steps": split.local_steps, "batch_size": split.batch}
    found = fed_avg(loss, start, train, key=seed, optimizer=optax.adam(step_size), **options)
    counts = {silo: np.bincount(data["y"], minlength=NUM_CLASSES) + 1 for silo, data in train.items()}
    total = sum(counts.values())
    odds = {silo: each / total if informed else np.ones(NUM_CLASSES) for silo, each in counts.items()}
    predict = jax.jit(lambda x, odds: jax.nn.softmax(logits(found, x) + jax.numpy.log(odds)))
    scored = evaluate(lambda silo, x: np.asarray(predict(x, odds[silo])), train, test)
    return scored | {"rounds": rounds, "seconds": round(time.perf_counter() - begin, 1)}


def majority(load, split: Split, seed: int, state: Path) -> Result:
    """Frequencies of the labels in each silo."""
    del split, seed, state
    train, test = load()
    found = baselines.majority(train, num_classes=NUM_CLASSES)
    return evaluate(found.predict, train, test) | {"rounds": 0, "seconds": 0.0}


def _probabilities(found, silo, x):
    data = {"x": x, "y": np.zeros(len(x), np.int32)}
    return found.silo(silo).predict(data, sites=["probabilities"], num_samples=NUM_DRAWS)["probabilities"]
