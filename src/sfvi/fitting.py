"""The front door: `sfvi.fit`."""

import dataclasses
import hashlib
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from . import archive
from ._random import as_key
from ._types import Key, Theta
from .algorithms import SFVI, AlgorithmOptions
from .convergence import Check, Convergence, StoppingRule
from .engines import batching, in_process, loop
from .engines.checkpoint import Checkpoint
from .engines.diagnosis import find_culprit
from .engines.progress import RunProgress
from .errors import ArchiveError, DataError, DivergenceError, OptionError
from .model import StructuredModel
from .posterior import GlobalPosterior, SiloPosterior

FIT_KIND = "fit"


class Fit:
    """The result of a run.

    Attributes:
        posterior: The global posterior.
        elbo: The ELBO estimate of every round; it rises, with noise.
        convergence: Evidence of the stopping rule, or None if none was asked for.
        seconds: Time spent in rounds, compilation left out; None for a loaded fit.
    """

    def __init__(
        self,
        posterior: GlobalPosterior,
        silos: Mapping[str, SiloPosterior],
        elbo: np.ndarray,
        convergence: Convergence | None,
        seconds: float | None,
    ):
        self.posterior = posterior
        self._silos = dict(silos)
        self.elbo = elbo
        self.convergence = convergence
        self.seconds = seconds

    def __repr__(self) -> str:
        level = f", ELBO {self.elbo[-100:].mean():,.2f}" if len(self.elbo) else ""
        verdict = "" if self.convergence is None else f"; {self.convergence.verdict}"
        return f"<Fit: {len(self._silos)} silos, {len(self.elbo)} rounds{level}{verdict}>"

    @property
    def theta(self) -> Theta:
        r"""The fitted $\theta$ in the model's own space."""
        return self.posterior.theta

    @property
    def silo_names(self) -> list[str]:
        """Names of the silos."""
        return list(self._silos)

    def silo(self, name: str) -> SiloPosterior:
        """The posterior of one silo's latents."""
        if name not in self._silos:
            raise OptionError(f"There is no silo {name!r}; there are {', '.join(map(repr, self._silos))}.")
        return self._silos[name]

    def save(self, folder: str | os.PathLike) -> None:
        """Write `global.npz`, `fit.npz` (ELBO and evidence) and `silos/<name>.npz`, each complete by itself."""
        folder = Path(folder)
        self.posterior.save(folder / "global.npz")
        evidence = None
        if self.convergence is not None:
            checks = [check._asdict() for check in self.convergence.checks]
            evidence = {**self.convergence._asdict(), "checks": checks}
        header = {"kind": FIT_KIND, "silos": self.silo_names, "convergence": evidence}
        archive.write(folder / "fit.npz", {"elbo": self.elbo}, header)
        for name, silo in self._silos.items():
            silo.save(folder / "silos" / _file_name(name))


def _file_name(silo):
    """A file name for any silo name; long ones are cut and told apart by a number."""
    quoted = quote(silo, safe="", errors="surrogatepass")
    if len(quoted) > 100:
        quoted = f"{quoted[:80]}-{hashlib.sha256(silo.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return f"{quoted}.npz"


def load(folder: str | os.PathLike, model: StructuredModel, silos: Mapping[str, Any]) -> Fit:
    """Read a fit written by `Fit.save`, for the model and data that made it.

    Args:
        folder: Where it was saved.
        model: The model.
        silos: Data of the silos to load; some or all of those fitted.
    """
    folder = Path(folder)
    if folder.is_file():
        raise ArchiveError(
            f"{str(folder)!r} is a file; sfvi.load takes the folder that Fit.save wrote. A single file is read by "
            "GlobalPosterior.load or SiloPosterior.load."
        )
    posterior = GlobalPosterior.load(folder / "global.npz", model)
    arrays, header = archive.read(folder / "fit.npz", kind=FIT_KIND)
    loaded = {
        name: SiloPosterior.load(folder / "silos" / _file_name(name), model, data) for name, data in silos.items()
    }
    evidence = header["convergence"]
    if evidence is not None:
        checks = tuple(Check(**check) for check in evidence["checks"])
        evidence = Convergence(**{**evidence, "checks": checks})
    return Fit(posterior, loaded, arrays["elbo"], evidence, None)


def fit(
    model: StructuredModel,
    silos: Mapping[str, Any],
    *,
    key: Key | int,
    num_rounds: int = 10_000,
    algorithm: AlgorithmOptions | None = None,
    until_converged: bool | StoppingRule = False,
    unit_ids: Mapping[str, Any] | None = None,
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
        num_rounds: Rounds, or their upper limit with `until_converged`.
        algorithm: `SFVI(...)`, the default.
        until_converged: True, or a `StoppingRule`, to stop when the result no longer moves.
        unit_ids: For each silo the ids of its units (see `StructuredModel.silo_data`).
        checkpoint: A file; if it exists the run continues from it, to the same digits.
        checkpoint_every: Seconds between saves.
        callback: Receives a `RunProgress` several times a second.
        progress: Show a progress bar; by default only on a terminal.

    Raises:
        ModelError, DataError, OptionError: Before any round, for bad input.
        DivergenceError: If NaN or a runaway ELBO appears; it carries the fit of the last good round.
    """
    rule = _stopping_rule(until_converged)
    if not isinstance(model, StructuredModel):
        raise OptionError(f"model is {model!r}; give a StructuredModel.")
    _check_silos(silos, unit_ids)
    _check_options(num_rounds, checkpoint, checkpoint_every, callback)
    run_key = as_key(key)
    algorithm = SFVI() if algorithm is None else algorithm
    if isinstance(algorithm, type) or not isinstance(algorithm, AlgorithmOptions):
        raise OptionError(f"algorithm is {algorithm!r}; give sfvi.SFVI(...).")
    data = {
        name: model.silo_data(name, silos[name], unit_ids=None if unit_ids is None else unit_ids[name])
        for name in sorted(silos)
    }
    _check_ids(data)
    theta = model.initial_theta(run_key, data)
    bound = algorithm.bind(model)
    batches = batching.plan(model, data, theta, merge=bound.additive)
    _check_support(theta, data, batches)
    rounds = loop.build(bound, batches)
    state = rounds.init(run_key, theta)
    saved = None
    if checkpoint is not None:
        saved = Checkpoint(checkpoint, _fingerprint(model, data, run_key, algorithm), every=checkpoint_every)
    outcome = in_process.run(
        rounds, run_key, state, num_rounds, rule=rule, checkpoint=saved, callback=callback, progress=progress
    )
    result = _result(model, data, batches, outcome)
    if outcome.convergence is not None and not outcome.convergence.converged and outcome.failed_round is None:
        warnings.warn(f"{outcome.convergence.verdict} Raise num_rounds.", stacklevel=2)
    if outcome.failed_round is not None:
        _raise_divergence(bound, run_key, data, batches, outcome, result)
    return result


def _result(model, data, batches, outcome) -> Fit:
    server = outcome.state.server
    theta = model.constrain_theta(server.theta, data)
    shared = GlobalPosterior(model, server.family, server.theta, theta)
    families = {}
    for batch, state in zip(batches, outcome.state.silos, strict=True):
        families |= batching.local_families(batch, state.family)
    silos = {name: SiloPosterior(name, shared, families[name], data[name]) for name in data}
    return Fit(shared, silos, outcome.history.elbo, outcome.convergence, outcome.seconds)


def _raise_divergence(bound, key, data, batches, outcome, result):
    states = {}
    for batch, state in zip(batches, outcome.state.silos, strict=True):
        families = batching.local_families(batch, state.family)
        states |= {name: state._replace(family=family) for name, family in families.items()}
    culprit = find_culprit(bound, loop.keys(key), outcome.state.server, states, data)
    where = "at the server" if culprit.silo is None else f"in silo {culprit.silo!r}"
    raise DivergenceError(
        f"Round {outcome.failed_round} broke {where} at site {culprit.site!r}: {culprit.symptom}; lower the step size, "
        "rescale the data or give that site a tighter prior (the last good state is in this error's `fit`).",
        round=outcome.failed_round,
        silo=culprit.silo,
        site=culprit.site,
        fit=result,
    )


def _stopping_rule(until_converged):
    if isinstance(until_converged, StoppingRule):
        return until_converged
    if not isinstance(until_converged, bool):
        raise OptionError(f"until_converged is {until_converged!r}; give True, False or a StoppingRule.")
    return StoppingRule() if until_converged else None


def _check_silos(silos, unit_ids):
    if not isinstance(silos, Mapping) or not silos:
        raise DataError("silos must be a mapping from silo name to data, with at least one silo.")
    for name in silos:
        if not isinstance(name, str) or not name:
            raise DataError(f"A silo is named {name!r}; names must be non-empty strings.")
    if unit_ids is None:
        return
    if not isinstance(unit_ids, Mapping) or set(unit_ids) != set(silos):
        odd = sorted(set(unit_ids) ^ set(silos)) if isinstance(unit_ids, Mapping) else sorted(silos)
        raise OptionError(f"unit_ids must map every silo to its ids; check {odd}.")


def _check_options(num_rounds, checkpoint, checkpoint_every, callback):
    if isinstance(num_rounds, bool) or not isinstance(num_rounds, int | np.integer) or num_rounds < 1:
        raise OptionError(f"num_rounds is {num_rounds!r}; give a whole number of at least 1.")
    if not isinstance(checkpoint, str | os.PathLike | None):
        raise OptionError(f"checkpoint is {checkpoint!r}; give the path of a file.")
    if not isinstance(checkpoint_every, int | float) or not checkpoint_every >= 0:
        raise OptionError(f"checkpoint_every is {checkpoint_every!r}; give seconds, not negative.")
    if callback is not None and not callable(callback):
        raise OptionError(f"callback is {callback!r}; give a function.")


def _check_support(theta, data, batches):
    """Refuse observations that their distribution cannot produce; silo by silo only if a batch has any."""

    @eqx.filter_jit
    def count(silo):
        return silo.program.violations(theta, silo)

    for batch in batches:
        found = eqx.filter_vmap(count)(batch.data) if batch.stacked else count(batch.data)
        if not any(bool(jnp.any(number > 0)) for number in found.values()):
            continue
        for name in batch.names:
            for site, number in count(data[name]).items():
                if number > 0:
                    raise DataError(
                        f"Silo {name!r}: the observed site {site!r} has {int(number)} values that its distribution "
                        "cannot produce; check the coding of the data, or choose another distribution."
                    )


def _check_ids(data):
    """No unit, and no silo, may stand twice under the same words: their noise would be the same."""
    claims: dict[str, list] = {}
    for position, silo in enumerate(data.values()):
        parts = {"the silo": silo.ids.silo} | {f"plate {p!r}": ids for p, ids in silo.ids.units.items()}
        for what, ids in parts.items():
            words = np.asarray(ids).astype(np.uint64)
            claims.setdefault(what, []).append((words[0] << np.uint64(32) | words[1], position))
    names = list(data)
    for what, parts in claims.items():
        words = np.concatenate([words for words, _ in parts])
        owners = np.concatenate([np.full(len(words), position) for words, position in parts])
        order = np.argsort(words, kind="stable")
        again = np.flatnonzero(words[order][1:] == words[order][:-1])
        if len(again):
            first, second = (names[owners[order[again[0] + step]]] for step in (0, 1))
            unit = words[order[again[0]]] & np.uint64(0xFFFFFFFF)
            raise OptionError(
                f"Silos {first!r} and {second!r} share an id ({what}, id {unit}); ids must be unique, or rename one of "
                "the silos."
            )


def _fingerprint(model, data, key, algorithm):
    """What a run is: model, silos, data, key and options, each hashed."""
    programs = {silo.program: silo for silo in data.values()}
    prints = sorted(program.fingerprint(silo) for program, silo in programs.items())
    contents = hashlib.sha256("".join(silo.fingerprint() for silo in data.values()).encode())
    ids = hashlib.sha256()
    for silo in data.values():
        for leaf in jax.tree.leaves(silo.ids):
            ids.update(np.asarray(leaf).tobytes())
    return {
        "precision": str(jnp.result_type(float)),
        "model": "".join([model.population.fingerprint(), *prints]),
        "set of silos": ",".join(data),
        "data set": contents.hexdigest(),
        "key": np.asarray(jax.random.key_data(key)).tobytes().hex(),
        "algorithm or option of it": _describe_options(algorithm),
        "assignment of unit_ids": ids.hexdigest(),
    }


def _describe_options(algorithm):
    """The algorithm and those of its options that have a plain value; functions cannot be compared."""
    plain = {
        field.name: getattr(algorithm, field.name)
        for field in dataclasses.fields(algorithm)
        if isinstance(getattr(algorithm, field.name), int | float | str)
    }
    return f"{type(algorithm).__name__}({plain})"
