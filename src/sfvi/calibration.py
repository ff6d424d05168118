r"""Simulation-based calibration: does the whole procedure get posteriors right, on average over the prior?

Draw $z_G$ from the prior, data from the silos' programs, fit, and count how many posterior draws of each coordinate lie
below its true value. Were the posteriors exact these ranks would be uniform (Talts et al. 2018): a pile at both ends
says that they are too narrow, in the middle too wide, at one end that they are shifted.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpyro.handlers as handlers
import pandas as pd
from rich.console import Console
from rich.progress import track
from scipy import stats

from ._random import as_key
from ._types import Key
from .algorithms import SFVI, AlgorithmOptions
from .diagnostics.verdicts import Trust, say
from .errors import DivergenceError, ModelError, OptionError
from .fitting import fit
from .model import StructuredModel
from .model.observed import is_observed

BINS = 10
LIMITS = (0.01, 0.0001)  # of the smallest p-value, corrected for their number


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The check "calibration".

    Attributes:
        trust: How far to trust posteriors of this model, silos and algorithm.
        verdict: Why.
        ranks: By simulation and coordinate, which part of the posterior draws lies below the truth.
        z_scores: By simulation and coordinate, how many posterior sds the mean lies above the truth.
        p_values: By coordinate, of uniform ranks (chi-squared test on ten bins).
        failed: Simulations whose fit diverged.
    """

    trust: Trust
    verdict: str
    ranks: pd.DataFrame = dataclasses.field(repr=False)
    z_scores: pd.DataFrame = dataclasses.field(repr=False)
    p_values: pd.Series = dataclasses.field(repr=False)
    failed: int
    name: str = "calibration"

    def plot(self) -> Any:
        """Histograms of the ranks, with the band in which 99% of the bars should lie."""
        import matplotlib.pyplot as plt

        labels = list(self.ranks)
        columns = min(4, len(labels))
        rows = -(-len(labels) // columns)
        size = (2.6 * columns, 2.0 * rows)
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", sharey=True)
        low, high = stats.binom.interval(0.99, len(self.ranks), 1 / BINS)
        for axis in axes.flat[len(labels) :]:
            axis.set_visible(False)
        for axis, label in zip(axes.flat, labels, strict=False):
            axis.hist(self.ranks[label], bins=BINS, range=(0, 1), color="tab:blue", alpha=0.7)
            axis.axhspan(low, high, color="tab:gray", alpha=0.3, linewidth=0)
            axis.set_title(label, fontsize=9)
        figure.supxlabel("part of the posterior below the truth", fontsize=9)
        figure.supylabel("simulations", fontsize=9)
        return figure


def simulation_based_calibration(
    model: StructuredModel,
    silos: Mapping[str, Any],
    *,
    key: Key | int,
    num_simulations: int = 100,
    num_rounds: int | None = None,
    algorithm: AlgorithmOptions | None = None,
    num_draws: int = 500,
    progress: bool | None = None,
) -> Calibration:
    """Fit simulated data many times and compare with what made them. For small models: every simulation is a fit.

    Args:
        model: The model. Its prior must make data that are worth fitting; a very wide one makes absurd ones.
        silos: Data by silo, whose covariates and shapes are used; what the programs observe is replaced.
        key: Of all randomness.
        num_simulations: How many.
        num_rounds: Of each fit; by default as in `sfvi.fit`.
        algorithm: As in `sfvi.fit`.
        num_draws: Of each posterior, from which ranks are computed.
        progress: Show a bar; by default only on a terminal.
    """
    if isinstance(num_simulations, bool) or not isinstance(num_simulations, int) or num_simulations < 20:
        raise OptionError(f"num_simulations is {num_simulations!r}; give at least 20, better 100.")
    run_key = as_key(key)
    _check(model, silos, run_key)
    replaced = _with_simulated(model)
    options = SFVI() if algorithm is None else algorithm
    num_rounds = options.usual_rounds if num_rounds is None else num_rounds
    options = options.planned(num_rounds)  # the same object in every fit, so that one compilation serves all
    names, ranks, z_scores, failed = None, [], [], 0
    show, bar = sys.stderr.isatty() if progress is None else progress, Console(stderr=True)
    for number in track(range(num_simulations), "simulations", console=bar, disable=not show):
        simulation = jax.random.fold_in(run_key, number)
        truth, data = _simulate(model, silos, simulation)
        try:
            found = fit(replaced, data, key=simulation, num_rounds=num_rounds, algorithm=options, progress=False)
        except DivergenceError:
            failed += 1
            continue
        draws = found.posterior.sample(simulation, num_draws)
        true = {site: np.asarray(truth[site], np.float64).ravel() for site in draws}
        drawn = {site: np.asarray(draws[site], np.float64).reshape(num_draws, -1) for site in draws}
        names = names or [
            f"{site}[{i}]" if true[site].size > 1 else site for site in draws for i in range(true[site].size)
        ]
        flat, values = np.concatenate(list(true.values())), np.concatenate(list(drawn.values()), axis=1)
        ranks.append((values < flat).mean(0))
        z_scores.append((values.mean(0) - flat) / values.std(0))
    below, errors = (pd.DataFrame(rows, columns=names) for rows in (ranks, z_scores))
    return _judge(below, errors, failed)


def _with_simulated(model):
    """The same model, whose silos observe what is handed to them beside their data."""

    def conditioned(program):
        def silo(globals_, data):
            return handlers.condition(program, data=data["simulated"])(globals_, data["given"])

        return silo

    given = model.silo_program
    silo = {name: conditioned(one) for name, one in given.items()} if isinstance(given, Mapping) else conditioned(given)
    return StructuredModel(model.population.program, silo, centring=model.centring)


def _check(model, silos, key):
    """Refuse what has no prior to simulate from."""
    data = {name: model.silo_data(name, silos[name]) for name in silos}
    for silo in data.values():
        if silo.program.layout.subsampled:
            plate = silo.program.layout.subsampled[0].name
            raise ModelError(f"Plate {plate!r} is subsampled; leave subsample_size out to calibrate.")
    learned = set().union(*(silo.program.learned for silo in data.values()))
    without = sorted(set(model.initial_theta(key, data)) - learned)
    if without:
        raise ModelError(f"The parameter {without[0]!r} has no prior to simulate from; make it a latent to calibrate.")


def _simulate(model, silos, key):
    """Global latents from the prior, and data from the silos' programs at them."""
    with handlers.trace() as recorded:
        globals_ = handlers.seed(model.population.program, key)()
    truth = {name: site["value"] for name, site in recorded.items()}
    data = {}
    for position, name in enumerate(sorted(silos)):
        known = model.silo_data(name, silos[name])
        args = (globals_, known.program.rebuild(known.values))
        seeds = jax.random.split(jax.random.fold_in(key, position))
        as_given = handlers.trace(handlers.seed(known.program.program, seeds[0])).get_trace(*args)
        observed = [site for site, message in as_given.items() if is_observed(message)]
        free = handlers.uncondition(known.program.program)
        drawn = handlers.trace(handlers.seed(free, seeds[1])).get_trace(*args)
        for site in observed:
            there, made = (np.shape(found[site]["value"]) for found in (as_given, drawn))
            if there != made:
                raise ModelError(
                    f"Site {site!r} of silo {name!r} observes {there}, but its distribution makes {made}; put it into "
                    "a plate, or expand the distribution, to calibrate."
                )
        data[name] = {"given": silos[name], "simulated": {site: np.asarray(drawn[site]["value"]) for site in observed}}
    return truth, data


def _judge(ranks, z_scores, failed):
    counts = {label: np.histogram(ranks[label], BINS, (0, 1))[0] for label in ranks}
    p_values = pd.Series({label: stats.chisquare(count).pvalue for label, count in counts.items()}, dtype=float)
    if p_values.empty:
        return Calibration("do not trust", "Do not trust: every fit diverged.", ranks, z_scores, p_values, failed)
    errors = pd.Series({label: stats.chi2.sf((z_scores[label] ** 2).sum(), len(z_scores)) for label in z_scores})
    combined = pd.concat([p_values, errors], axis=1).min(axis=1)  # errors show sooner that posteriors are too narrow
    smallest, label = float(combined.min() * 2 * len(combined)), str(combined.idxmin())
    spread, bias = float(z_scores[label].std()), float(z_scores[label].mean())
    shape = f"means are {bias:+.2f} sd off on average, errors are {spread:.2f} times what the posteriors say"
    trust: Trust = "fine" if smallest > LIMITS[0] else "doubtful" if smallest > LIMITS[1] else "do not trust"
    if trust == "fine":
        why = f"ranks of the truth are uniform in {len(ranks)} simulations (smallest p {combined.min():.2f}, {label})."
    else:
        why = f"{label!r} is not calibrated in {len(ranks)} simulations (p {combined.min():.1g}): {shape}."
    if failed:
        trust = "do not trust" if failed > 0.05 * (failed + len(ranks)) else trust
        why = f"{failed} of {failed + len(ranks)} fits diverged; {why}"
    return Calibration(trust, say(trust, why), ranks, z_scores, p_values, failed)
