"""The front door: `sfvi.fit`."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._random import as_key
from ._types import Key
from .algorithms import SFVI, AlgorithmOptions, FederatedAlgorithm
from .convergence import StoppingRule
from .engines import batching, in_process, loop
from .engines.checkpoint import Checkpoint
from .engines.diagnosis import find_culprit
from .engines.progress import RunProgress
from .errors import DataError, DivergenceError, OptionError
from .families import StructuredLocal
from .model import StructuredModel
from .network_identity import network_identity
from .posterior import GlobalPosterior, SiloPosterior
from .results import Fit
from .run_checks import (
    check_batched_inputs,
    check_ids,
    check_networks,
    check_participation,
    check_support,
    check_weights,
    fingerprint,
)

STAGE_STREAM = 2  # keys 0 and 1 are those of the server and the silos, see `loop.keys`


def fit(
    model: StructuredModel,
    silos: Mapping[str, Any],
    *,
    key: Key | int,
    num_rounds: int = 10_000,
    algorithm: AlgorithmOptions | None = None,
    until_converged: bool | StoppingRule = False,
    unit_ids: Mapping[str, Any] | None = None,
    num_units: Mapping[str, float] | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: float = 30.0,
    callback: Callable[[RunProgress], None] | None = None,
    progress: bool | None = None,
) -> Fit:
    """Fit a structured model to silos, on this machine, in this process.

    Args:
        model: The model.
        silos: Data by silo name, each as the silo program expects them.
        key: Of all randomness; the same key gives the same result, bit for bit.
        num_rounds: Rounds, or their upper limit with `until_converged`; those of a fast start come on top.
        algorithm: `SFVI(...)`, the default, or `SFVIAvg(...)`.
        until_converged: True, or a `StoppingRule`, to stop when the result no longer moves.
        unit_ids: For each silo the ids of its units (see `StructuredModel.silo_data`).
        num_units: For each silo the number of its exchangeable units (see `StructuredModel.silo_data`).
        checkpoint: A file; if it exists the run continues from it, to the same digits. A fast start keeps its own
            beside it, with `.start0` added to the name.
        checkpoint_every: Seconds between saves.
        callback: Receives a `RunProgress` several times a second.
        progress: Show a progress bar; by default only on a terminal.

    Raises:
        ModelError, DataError, OptionError: Before any round, for bad input.
        DivergenceError: If NaN or a runaway ELBO appears; it carries the fit of the last good round.
    """
    if not isinstance(model, StructuredModel):
        raise OptionError(f"model is {model!r}; give a StructuredModel.")
    _check_silos(silos, unit_ids=unit_ids, num_units=num_units)
    _check_options(num_rounds, checkpoint, checkpoint_every, callback)
    run_key = as_key(key)
    algorithm = SFVI() if algorithm is None else algorithm
    if isinstance(algorithm, type) or not isinstance(algorithm, AlgorithmOptions):
        raise OptionError(f"algorithm is {algorithm!r}; give sfvi.SFVI(...) or sfvi.SFVIAvg(...).")
    data = {
        name: model.silo_data(
            name, silos[name], unit_ids=(unit_ids or {}).get(name), num_units=(num_units or {}).get(name)
        )
        for name in sorted(silos)
    }
    check_ids(data)
    theta = model.initial_theta(run_key, data)
    rule = _stopping_rule(until_converged, algorithm.bind(model).steps_per_round)
    check_networks(algorithm, data)
    planned = _plan(model, data, theta, algorithm, run_key, num_rounds)
    check_support(theta, data, planned[0].batches)
    saved: list[Checkpoint | None] = [None] * len(planned)
    if checkpoint is not None:
        print_ = fingerprint(model, data, run_key, algorithm)
        saved = _checkpoints(checkpoint, print_, checkpoint_every, planned)
    done: list[_Stage] = []
    for stage, file in zip(planned, saved, strict=True):
        last = stage is planned[-1]
        outcome = in_process.run(
            stage.loop,
            stage.key,
            _start(stage, theta, done[-1] if done else None),
            stage.num_rounds,
            rule=rule if last else None,
            checkpoint=file,
            callback=callback,
            progress=progress,
        )
        done.append(_finish(stage, outcome))
        if outcome.failed_round is not None:
            _raise_divergence(done[-1], data, _result(model, data, done))
    return _say(_result(model, data, done), done)


class _Stage(NamedTuple):
    """One algorithm's part of a run; families and outcome come after it."""

    bound: FederatedAlgorithm
    batches: list[batching.Batch]
    loop: loop.Loop
    key: Key
    num_rounds: int
    families: dict[str, StructuredLocal]
    outcome: in_process.Outcome | None


def _plan(model, data, theta, algorithm, key, num_rounds) -> list[_Stage]:
    """Prepare and check all stages before the first begins."""
    stages = algorithm.stages()
    planned = []
    for position, (options, rounds) in enumerate(stages):
        last = position == len(stages) - 1
        stage_key = key if last else jax.random.fold_in(key, STAGE_STREAM + position)
        bound = options.bind(model)
        batches = batching.plan(model, data, theta, merge=bound.additive)
        check_batched_inputs(options, data, batches)
        rounds = num_rounds if rounds is None else rounds
        check_participation(options.participation, loop.keys(stage_key)[0], list(data), rounds)
        compiled = loop.build(bound, batches, {name: silo.num_units for name, silo in data.items()})
        planned.append(_Stage(bound, batches, compiled, stage_key, rounds, {}, None))
    return planned


def _checkpoints(path, print_, every, planned) -> list[Checkpoint | None]:
    """The file of each stage, each checked; that of a fast start lies beside the one that the user named."""
    names = [f"{os.fspath(path)}.start{position}" for position in range(len(planned) - 1)] + [path]
    files = [Checkpoint(name, print_, every=every) for name in names]
    for file, stage in zip(files, planned, strict=True):
        file.check(stage.num_rounds)
    return list(files)


def _start(stage, theta, before) -> loop.State:
    """The state before a stage's first round: where the stage before ended."""
    if before is None:
        return stage.loop.init(stage.key, theta)
    families = tuple(batching.batch_family(batch, before.families) for batch in stage.batches)
    return stage.loop.adopt(stage.key, before.outcome.state.server.shared, families)


def _finish(stage, outcome) -> _Stage:
    """Take each silo's local family; after a failure as it is, without a refit."""
    rounds = stage.loop
    if outcome.failed_round is not None:
        elbo = stage.bound.elbo
        plain = stage.bound._replace(elbo=elbo._replace(options=dataclasses.replace(elbo.options, refit_steps=0)))
        rounds = dataclasses.replace(rounds, algorithm=plain)
    families = {}
    for batch, family in zip(stage.batches, rounds.finish(stage.key, outcome.state), strict=True):
        families |= batching.local_families(batch, family)
    return stage._replace(families=families, outcome=outcome)


def _result(model, data, done) -> Fit:
    stage = done[-1]
    shared, elbo = stage.outcome.state.server.shared, stage.bound.elbo
    theta = model.constrain_theta(shared.theta, data)
    chosen = elbo.options.local_family
    posterior = GlobalPosterior(model, shared, theta, chosen, network_identity(chosen, data))
    silos = {
        name: SiloPosterior(name, posterior, elbo.local(shared, stage.families[name], silo), silo)
        for name, silo in data.items()
    }
    traces = [part.outcome.history.trace for part in done]
    lengths = [len(trace["elbo"]) for trace in traces]
    names = sorted(set().union(*traces))
    trace = {
        name: np.concatenate([t.get(name, np.full(n, np.nan)) for t, n in zip(traces, lengths, strict=True)])
        for name in names
    }
    present = None
    if any(part.bound.elbo.options.participation.partial for part in done):
        present = np.concatenate([_present(part, n) for part, n in zip(done, lengths, strict=True)])
    seconds = sum(part.outcome.seconds for part in done)
    return Fit(posterior, silos, trace, present, stage.outcome.convergence, seconds)


def _present(stage, num_rounds):
    """Who took part in which round: a function of the key, so nothing had to be recorded."""
    server_key, _ = loop.keys(stage.key)
    server = stage.outcome.state.server

    @jax.jit
    def one(number):
        drawn = stage.bound.participants(server_key, server._replace(round=number))
        return jnp.zeros(len(server.num_units), bool).at[drawn.index].set(drawn.weight > 0)

    return np.asarray(jax.lax.map(one, jnp.arange(num_rounds, dtype=jnp.int32)))


def _say(result, done) -> Fit:
    """Warn of what a user should know."""
    convergence = result.convergence
    if convergence is not None and not convergence.converged:
        warnings.warn(f"{convergence.verdict} Raise num_rounds.", stacklevel=3)
    for stage in done:
        for remark in stage.bound.remarks(stage.outcome.history.trace):
            warnings.warn(remark, stacklevel=3)
    return result


def _raise_divergence(stage, data, result):
    outcome, silos = stage.outcome, {}
    for batch, state in zip(stage.batches, outcome.state.silos, strict=True):
        silos |= batching.members(batch, state, data)
    server_key, _ = loop.keys(stage.key)
    drawn = stage.bound.participants(server_key, outcome.state.server)
    check_weights(drawn, outcome.failed_round, list(data))
    culprit = find_culprit(stage.bound, loop.keys(stage.key), outcome.state.server, silos)
    where = "at the server" if culprit.silo is None else f"in silo {culprit.silo!r}"
    raise DivergenceError(
        f"Round {outcome.failed_round} broke {where} at site {culprit.site!r}: {culprit.symptom}; lower the step size, "
        "rescale the data or give that site a tighter prior (the last good state is in this error's `fit`).",
        round=outcome.failed_round,
        silo=culprit.silo,
        site=culprit.site,
        fit=result,
    )


def _stopping_rule(until_converged, steps_per_round):
    if isinstance(until_converged, StoppingRule):
        return until_converged
    if not isinstance(until_converged, bool):
        raise OptionError(f"until_converged is {until_converged!r}; give True, False or a StoppingRule.")
    return StoppingRule.for_rounds_of(steps_per_round) if until_converged else None


def _check_silos(silos, **by_silo):
    if not isinstance(silos, Mapping) or not silos:
        raise DataError("silos must be a mapping from silo name to data, with at least one silo.")
    for name in silos:
        if not isinstance(name, str) or not name:
            raise DataError(f"A silo is named {name!r}; names must be non-empty strings.")
    for option, given in by_silo.items():
        if given is None:
            continue
        if not isinstance(given, Mapping) or set(given) != set(silos):
            odd = sorted(set(given) ^ set(silos)) if isinstance(given, Mapping) else sorted(silos)
            what = "its ids" if option == "unit_ids" else "its number"
            raise OptionError(f"{option} must map every silo to {what}; check {odd}.")


def _check_options(num_rounds, checkpoint, checkpoint_every, callback):
    if isinstance(num_rounds, bool) or not isinstance(num_rounds, int | np.integer) or num_rounds < 1:
        raise OptionError(f"num_rounds is {num_rounds!r}; give a whole number of at least 1.")
    if not isinstance(checkpoint, str | os.PathLike | None):
        raise OptionError(f"checkpoint is {checkpoint!r}; give the path of a file.")
    if not isinstance(checkpoint_every, int | float) or not checkpoint_every >= 0:
        raise OptionError(f"checkpoint_every is {checkpoint_every!r}; give seconds, not negative.")
    if callback is not None and not callable(callback):
        raise OptionError(f"callback is {callback!r}; give a function.")
