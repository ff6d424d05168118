"""The front door: `sfvi.fit`."""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from . import stages
from ._random import as_key
from ._types import Key
from .algorithms import SFVI, AlgorithmOptions
from .algorithms.under_noise import noise_left
from .convergence import StoppingRule
from .engines import batching, in_process, loop
from .engines.checkpoint import Checkpoint
from .engines.diagnosis import find_culprit
from .engines.progress import RunProgress
from .errors import DataError, DivergenceError, OptionError
from .model import StructuredModel
from .network_identity import network_identity
from .posterior import GlobalPosterior, SiloPosterior
from .provenance import Provenance, provenance, replies, spent
from .results import Fit, joined_path, joined_trace, noise_error
from .run_checks import (
    check_centred_sites,
    check_fixed_noise,
    check_ids,
    check_networks,
    check_support,
    check_weights,
    fingerprint,
    remark_on_size,
    remarks_on_privacy,
    settle_bound,
)
from .stages import Stage


def fit(
    model: StructuredModel,
    silos: Mapping[str, Any],
    *,
    key: Key | int,
    num_rounds: int | None = None,
    algorithm: AlgorithmOptions | None = None,
    until_converged: bool | StoppingRule = False,
    unit_ids: Mapping[str, Any] | None = None,
    num_units: Mapping[str, float] | None = None,
    start: Fit | None = None,
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
        num_rounds: Rounds, or their upper limit with `until_converged`; those of a fast start come on top. By default
            10,000 of SFVI (100 if `fixed_noise` climbs by L-BFGS), 100 of SFVIAvg, 40 of Sites.
        algorithm: `SFVI(...)`, the default, `SFVIAvg(...)` or `Sites(...)`.
        until_converged: True, or a `StoppingRule`, to stop when the result no longer moves.
        unit_ids: For each silo the ids of its units (see `StructuredModel.silo_data`).
        num_units: For each silo the number of its exchangeable units (see `StructuredModel.silo_data`).
        start: An earlier fit of the same model to begin from, whatever algorithm made it. Silos with the same units as
            there go on from their latents' posteriors too.
        checkpoint: A file; if it exists the run continues from it, to the same digits; with a larger `num_rounds` too
            if an optimizer is given, or `until_converged`: otherwise the step size would fall in another way. A fast
            start keeps its own beside it, with `.start0` added to the name.
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
    options = SFVI() if algorithm is None else algorithm
    if isinstance(options, type) or not isinstance(options, AlgorithmOptions):
        raise OptionError(f"algorithm is {algorithm!r}; give sfvi.SFVI(...), sfvi.SFVIAvg(...) or sfvi.Sites(...).")
    num_rounds = options.usual_rounds if num_rounds is None else num_rounds
    if start is not None and getattr(options, "privacy", None) is not None:
        raise OptionError(
            "start: what that fit learned from the data is not in the epsilon of this one; leave start or privacy out."
        )
    given = {"unit_ids": unit_ids, "num_units": num_units, "start": start}
    settings = {"num_rounds": num_rounds, "until_converged": until_converged}
    settings |= {name: "given" for name, value in given.items() if value is not None}
    origin = provenance("in process", options, key, settings)
    data = {
        name: model.silo_data(
            name, silos[name], unit_ids=(unit_ids or {}).get(name), num_units=(num_units or {}).get(name)
        )
        for name in sorted(silos)
    }
    check_ids(data)
    check_centred_sites(model, data)
    theta = model.initial_theta(run_key, data)
    options = settle_bound(options, theta, data)
    rule = _stopping_rule(until_converged, options.bind(model).steps_per_round)
    check_networks(options, data)
    check_fixed_noise(options, model, data)
    parts = stages.schedule(options, run_key, num_rounds, ends=rule is None)
    planned = stages.plan(model, data, theta, parts)
    check_support(theta, data, planned[0].batches)
    parameters = stages.warm(start, planned[0], theta, data)
    saved: list[Checkpoint | None] = [None] * len(planned)
    if checkpoint is not None:
        falls = rule is None and options.planned(num_rounds) is not options
        print_ = fingerprint(model, data, run_key, options, num_rounds if falls else None)
        saved = stages.checkpoints(checkpoint, print_, checkpoint_every, planned)
    if checkpoint is None or not Path(checkpoint).exists():
        _warn(planned[-1], theta, data)
    done: list[Stage] = []
    for stage, file in zip(planned, saved, strict=True):
        outcome = in_process.run(
            stage.loop,
            stage.key,
            stage.start(theta, parameters),
            stage.num_rounds,
            rule=rule if stage.is_main else None,
            checkpoint=file,
            callback=callback,
            progress=progress,
        )
        done.append(stage.finish(outcome))
        if outcome.failed_round is not None:
            _raise_divergence(done[-1], data, _result(model, data, done, origin))
        parameters = next((part for part in done if part.is_main), done[-1]).handed_on()
    return _say(_result(model, data, done, origin), done)


def _noise_left(stage, num_silos):
    """What a stage leaves of its noise; None if it broke off."""
    if len(stage.outcome.history.elbo) < stage.num_rounds:
        return None
    sizes = {"num_silos": num_silos, "num_rounds": stage.num_rounds}
    return noise_left(stage.bound.elbo.options, stage.outcome.state.server.shared.family, **sizes)


def _warn(stage, theta, data):
    """Say before the first round what differential privacy costs, or does not give, and if it will take very long."""
    elbo = stage.bound.elbo
    remarks = [remark_on_size(elbo, stage.key, theta, data)]
    if elbo.options.privacy is not None:
        family = eqx.filter_eval_shape(elbo.start_shared, stage.key, theta).family
        remarks += remarks_on_privacy(elbo.options, family, num_silos=len(data), num_rounds=stage.num_rounds)
    for said in remarks:
        if said is not None:
            warnings.warn(said, stacklevel=3)


def _result(model, data, done, origin: Provenance) -> Fit:
    stage = next((part for part in done if part.is_main), done[-1])
    way, after = done[: done.index(stage) + 1], done[done.index(stage) + 1 :]
    shared, elbo = stage.outcome.state.server.shared, stage.bound.elbo
    theta = model.constrain_theta(shared.theta, data)
    chosen = elbo.options.local_family
    posterior = GlobalPosterior(model, shared, theta, chosen, elbo.bound, network_identity(chosen, data))
    silos = {
        name: SiloPosterior(name, posterior, elbo.local(shared, stage.families[name], silo), silo)
        for name, silo in data.items()
    }
    histories = [part.outcome.history for part in way]
    lengths = [len(history.elbo) for history in histories]
    present = None
    if any(part.bound.elbo.options.participation.partial for part in way):
        present = np.concatenate([_present(part, n) for part, n in zip(way, lengths, strict=True)])
    return Fit(
        posterior,
        silos,
        joined_trace(histories),
        path=joined_path(model, histories),
        communication=_communication(done),
        noise_error=noise_error(model, shared.family, [_family(part) for part in after]) if after else None,
        present=present,
        convergence=stage.outcome.convergence,
        seconds=sum(part.outcome.seconds for part in done),
        provenance=origin._replace(
            sent=replies((part.bound, _silent(part)) for part in done),
            privacy=spent(elbo.options, len(stage.outcome.history.elbo), _noise_left(stage, len(data))),
        ),
    )


def _silent(stage):
    """What a silo's reply looks like."""
    bound, key = stage.bound, loop.keys(stage.key)[0]
    return eqx.filter_eval_shape(lambda server: bound.silent(bound.broadcast(key, server)), stage.outcome.state.server)


def _communication(done):
    """Rounds, and bytes of the two messages between the server and one silo."""
    rows = [
        [
            type(part.bound).__name__.removeprefix("Bound"),
            len(part.outcome.history.elbo),
            *part.loop.message_sizes(loop.keys(part.key), part.outcome.state),
        ]
        for part in done
    ]
    return pd.DataFrame(rows, columns=["algorithm", "rounds", "bytes to a silo", "bytes from a silo"])


def _family(stage):
    return stage.outcome.state.server.shared.family


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
    server_key, silo_key = loop.keys(stage.key)
    drawn = stage.bound.participants(server_key, outcome.state.server)
    check_weights(drawn, outcome.failed_round, list(data))
    broadcast = stage.bound.broadcast(server_key, outcome.state.server)
    culprit = find_culprit(stage.bound, silo_key, broadcast, silos)
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
    if num_rounds is not None and (
        isinstance(num_rounds, bool) or not isinstance(num_rounds, int | np.integer) or num_rounds < 1
    ):
        raise OptionError(f"num_rounds is {num_rounds!r}; give a whole number of at least 1.")
    if not isinstance(checkpoint, str | os.PathLike | None):
        raise OptionError(f"checkpoint is {checkpoint!r}; give the path of a file.")
    if not isinstance(checkpoint_every, int | float) or not checkpoint_every >= 0:
        raise OptionError(f"checkpoint_every is {checkpoint_every!r}; give seconds, not negative.")
    if callback is not None and not callable(callback):
        raise OptionError(f"callback is {callback!r}; give a function.")
