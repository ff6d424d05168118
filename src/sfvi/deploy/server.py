"""The server's side of a run: asks the silos, waits for them, applies each round once, and keeps it on disk."""

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from .._random import as_key
from ..algorithms.participation import Everyone
from ..algorithms.under_noise import noise_left
from ..bounds import Bound
from ..engines.in_process import all_finite
from ..engines.logbook import History, Logbook
from ..errors import DeploymentError, DivergenceError, OptionError, WireError
from ..posterior import GlobalPosterior
from ..privacy.masking import unmask
from ..provenance import provenance, replies, spent
from ..results import Fit, joined_path, joined_trace, noise_error
from ..run_checks import best_bound, check_fixed_noise, check_participation, remarks_on_privacy
from . import agreement, masked, plan, sums, wire
from .code import Code
from .codec import flatten, size_limit, unflatten
from .exchange import Exchange, InterruptedRunError, Transport
from .ledger import Agreed, Cadence, Finished, Ledger, Position
from .rounds import ONE, Rounds
from .spec import RunSpec
from .status import Reporter

log = logging.getLogger("sfvi")


class Server:
    """The server of one run.

    Args:
        spec: The run.
        code: The model.
        folder: Where it remembers; the run gets a folder of its own inside.
        transport: Carries messages to silos and back.
    """

    def __init__(self, spec: RunSpec, code: Code, folder: Path, transport: Transport):
        self.spec, self.code, self.model = spec, code, code.model
        self.names = list(spec.silos)
        self.folder = Path(folder) / spec.name
        self.ledger = Ledger(self.folder, spec, code)
        self.report = Reporter(self.folder, spec)
        self.exchange = Exchange(transport, spec, code, self.report)
        options: Any = spec.chosen(code)
        check_fixed_noise(options, self.model, {})
        if spec.min_silos is not None and not isinstance(options.participation, Everyone):
            raise OptionError("min_silos and participation are two ways to leave silos out; choose one.")
        if options.privacy is not None and spec.disclose_elbo:
            raise OptionError("privacy: the ELBO has no noise; leave disclose_elbo out.")
        everyone = getattr(options, "fixed_noise", None) is not None or (options.bound or Bound()).over == "everything"
        if spec.min_silos is not None and everyone:
            raise OptionError("min_silos: fixed_noise and the importance-weighted bound need all silos in every round.")

    def run(self) -> Fit:
        """Begin, or go on where the run stands, to its end."""
        self.ledger.check()
        try:
            fit = self._run()
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            told = DeploymentError(
                f"The server cannot use its files: {os.strerror(error.errno or 0)}{where}; mend that, then start the "
                "run again under its name: it goes on where it was."
            )
            with contextlib.suppress(OSError):
                self.report.stopped(told)
            raise told from error
        except Exception as error:
            self.report.stopped(error)
            raise
        except (KeyboardInterrupt, SystemExit):
            self.report.stopped(DeploymentError("It was stopped from outside; the same name goes on where it was."))
            raise
        self.report.finished()
        return fit

    def _run(self):
        attempt = self.ledger.begin()
        known, begun = self.ledger.agreed(), False
        if known is not None:  # it may be over already
            position = self._position(known)
            if position.leg == len(self.legs):
                return self._result(position)
            begun = position.step > 0
        known = self._agree(attempt, known, begun=begun)
        position = self._position(known)
        self._check_versions(position)
        if position.step == 0:
            self._warn_of_noise(position.state.shared.family)
        for number in range(position.leg, len(self.legs)):
            position = self._leg(attempt, number, position)
        return self._result(position)

    def _agree(self, attempt, known, *, begun):
        """Ask all silos to join; settle what depends on them, or check that it still is as it was.

        The beginning needs everyone, whatever `min_silos` says: who takes part is settled there.
        """
        offer = agreement.offer(self.spec, self.code, attempt)
        answers = self._ask_before("join", dict.fromkeys(self.names, (offer, {})), everyone=not begun)
        joined = {name: _of(name, agreement.Joined.read, message) for name, message in answers.items()}
        if known is None:
            known = self._settle(joined)
            self.ledger.agree(known)
        for name, said in joined.items():
            if said.num_units != known.units[name]:
                raise DeploymentError(
                    f"Silo {name!r} comes back with {said.num_units:g} units, it began this run with "
                    f"{known.units[name]:g}; go on with the data it began with, or begin a run of another name."
                )
        paths, arrays = agreement.theta_arrays(known.theta)
        settled = {**offer, "bound": list(known.bound), "theta": paths, "keys": known.keys}
        there = self._ask_before("begin", dict.fromkeys(joined, (settled, arrays)), everyone=not begun)
        self.versions = {name: _of(name, agreement.versions, message) for name, message in there.items()}
        return known

    def _ask_before(self, kind, questions, *, everyone):
        """Ask before the first round."""
        try:
            return self.exchange.ask(kind, -1, questions, limit=agreement.JOIN_LIMIT, everyone=everyone)
        except InterruptedRunError as error:
            if self.spec.min_silos is None or not everyone:
                raise
            raise DeploymentError(
                f"The run {self.spec.name!r} cannot begin: {error} All named silos must be there once; start them, or "
                "leave them out of the run."
            ) from error

    def _settle(self, joined):
        theta = dict(self.model.initial_theta(as_key(self.spec.key), {}))
        for name in self.names:
            for param, value in joined[name].theta.items():
                known = theta.setdefault(param, value)
                if jax.tree.map(jnp.shape, known) != jax.tree.map(jnp.shape, value):
                    raise DeploymentError(f"The parameter {param!r} has another shape in silo {name!r} than elsewhere.")
        options: Any = self.spec.chosen(self.code)
        bound = options.bound
        if bound is None:
            groups = any(said.groups for said in joined.values())
            bound = best_bound(options, groups=groups, tangled=any(said.tangled for said in joined.values()))
        units = {name: joined[name].num_units for name in self.names}
        network = next((joined[name].network for name in self.names if joined[name].network is not None), None)
        keys: dict[str, Any] = {name: joined[name].key for name in self.names if self.spec.secure_sum}
        _check_different(keys)
        return Agreed(bound, theta, units, network, keys)

    def _position(self, agreed):
        """Where the run stands: at its beginning, or where the disk says."""
        self.agreed = agreed
        self.legs = plan.legs(self.spec, self.code, agreed.bound)
        self.num_units = jnp.asarray([agreed.units[name] for name in self.names], jnp.result_type(float))
        self._broadcasts = [leg.broadcast_like(agreed.theta, len(self.names)) for leg in self.legs]
        for leg, like in zip(self.legs, self._broadcasts, strict=True):
            self.spec.wire.check(leg.algorithm)
            if self.spec.secure_sum:
                sums.check(leg.algorithm, like)
            check_participation(leg.algorithm.elbo.options.participation, leg.server_key, self.names, leg.num_rounds)
        first = self.legs[0]
        start = first.algorithm.server_init(first.server_key, agreed.theta, self.num_units)
        states = [leg.algorithm.server_start(start.shared, self.num_units) for leg in self.legs]
        position = self.ledger.read(states, start.shared)
        nowhere = dict.fromkeys(self.names, -1)
        return position or Position(0, 0, start, None, [], nowhere, self._nobody(), 0.0, (0, 0))

    def _warn_of_noise(self, family):
        """Say before the first round what its differential privacy costs, or does not give."""
        known = family if self.spec.min_silos is None else None
        for leg in self.legs:
            sizes = {"num_silos": len(self.names), "num_rounds": leg.num_rounds}
            for said in remarks_on_privacy(leg.algorithm.elbo.options, known, **sizes):
                log.warning("%s", said)

    def _check_versions(self, position):
        """Every silo must still have what belongs to where the server stands."""
        for name, versions in self.versions.items():
            if position.last[name] >= 0 and position.last[name] not in versions:
                raise DeploymentError(
                    f"Silo {name!r} has no state of step {position.last[name]} (it has {versions or 'none'}): its "
                    "folder was lost or is of another time; restore it from a backup, or begin a run of another name."
                )
        if position.step:
            log.info("run %s: goes on after step %d", self.spec.name, position.step - 1)

    def _leg(self, attempt, number, position):
        """All rounds of one algorithm, and its end."""
        leg = self.legs[number]
        rounds = Rounds(leg, self._broadcasts[number])
        if position.history is None:
            position = self._start(attempt, number, rounds, position)
        partial = leg.algorithm.elbo.options.participation.partial or self.spec.min_silos is not None
        rule, steps = plan.stopping_rule(self.spec, leg), leg.algorithm.steps_per_round
        book = Logbook(position.history, leg.num_rounds, rule, steps_per_round=steps, partial=partial)
        cadence = Cadence(always=partial or self.exchange.transport.forgetful)
        durable = dict(position.last)
        while not book.finished:
            begin, mark = time.perf_counter(), cadence.due() or book.round == leg.num_rounds - 1
            position = self._round(attempt, leg, rounds, position, book, durable, mark)
            spent = position.seconds + time.perf_counter() - begin
            position = position._replace(seconds=spent, sizes=self.exchange.sizes)
            if mark:
                self.ledger.write(position._replace(history=book.history))
                durable = dict(position.last)
            seconds = time.perf_counter() - begin
            cadence.took(seconds, marked=mark)
            latest = self.exchange.latest
            self.report.round(number, leg.kind, book, latest, seconds=seconds, saving=cadence.share)
        for remark in leg.algorithm.remarks(book.history.trace):
            log.warning("%s", remark)
        return self._end(attempt, rounds, position, book, durable)

    def _start(self, attempt, number, rounds, position):
        """The start of an algorithm, from where the ones before it ended: every silo makes its state."""
        leg, done = self.legs[number], position.done
        if done:
            main = next((part for part, each in zip(done, self.legs, strict=False) if each.kind == "main"), done[-1])
            position = position._replace(state=leg.algorithm.server_start(main.shared, self.num_units))
        answers = self._tell("start", attempt, position, rounds, dict(position.last))
        history = History.empty(["elbo"], position.state.shared.family)
        last = dict.fromkeys(answers, position.step)
        position = position._replace(leg=number, step=position.step + 1, history=history, last=last)
        self.ledger.write(position)
        return position

    def _tell(self, kind, attempt, position, rounds, durable):
        """Ask all silos for something that is no round, and is saved in any case."""
        _, broadcast = rounds.begin(position.state)
        sent = flatten(broadcast, prefix="broadcast", dtype=self.spec.wire.broadcast)
        leg = len(position.done)
        orders = {
            name: (agreement.Order(attempt, leg, position.last[name], durable[name], True)._asdict(), sent)
            for name in self.names
        }
        last = kind == "finish" and leg == len(self.legs) - 1  # what others build on needs everyone
        return self.exchange.ask(kind, position.step, orders, limit=agreement.JOIN_LIMIT, everyone=not last)

    def _round(self, attempt, leg, rounds, position, book, durable, mark):
        """Broadcast, wait, apply."""
        state = position.state
        drawn, broadcast = rounds.begin(state)
        sent = flatten(broadcast, prefix="broadcast", dtype=self.spec.wire.broadcast)
        broadcast = unflatten(rounds.broadcast_like, sent, prefix="broadcast", dtype=self.spec.wire.broadcast)
        listed = {self.names[index]: weight for index, weight in zip(*map(np.asarray, drawn), strict=True)}
        present = [name for name, weight in listed.items() if weight > 0]
        orders = {}
        for name in present:
            order = agreement.Order(attempt, position.leg, position.last[name], durable[name], mark)
            order = order._replace(among=tuple(sorted(present)))
            orders[name] = (order._asdict(), sent)
        silent = rounds.silent(broadcast)
        answers = self.exchange.ask("round", position.step, orders, limit=size_limit(silent))
        # as if who came had been drawn
        scale = 1.0 if self.spec.min_silos is None else len(orders) / max(1, len(answers))
        if self.spec.secure_sum and answers:
            total = self._sum(attempt, position.step, answers, present)
            combined = sums.incoming(leg.algorithm, silent, total, scale=scale)
            state, info = rounds.apply(state, broadcast, [combined.reply], ONE, [1.0])
            elbo_terms = combined.elbo if self.spec.disclose_elbo else float("nan")
        else:
            replies, terms = self._replies(leg, listed, answers, silent)
            weights = scale * np.array([weight * (name in answers) for name, weight in listed.items()])
            state, info = rounds.apply(state, broadcast, replies, drawn, weights)
            elbo_terms = np.dot(weights, terms)
        values = {name: np.asarray(value, np.float64)[None] for name, value in info._asdict().items()}
        elbo = values.pop("elbo_term") + elbo_terms
        trace = {"elbo": elbo, **values}
        if not all_finite(state) or (self.spec.disclose_elbo and book.runs_away(elbo)):
            raise DivergenceError(
                f"Round {book.round} broke at the server: its parameters are not finite, or the ELBO ran away; lower "
                "the step size, or give the global sites tighter priors (the state before it is kept).",
                round=book.round,
                silo=None,
                site="?",
            )
        book.accept(trace, state.shared.family)
        last = position.last | dict.fromkeys(answers, position.step)
        present = np.append(position.present, [[name in answers for name in self.names]], axis=0)
        return position._replace(step=position.step + 1, state=state, last=last, present=present)

    def _sum(self, attempt, step, answers, present):
        """The sum of masked replies: those who answered help to take the masks away, and see nothing of it."""
        parts = {
            name: _of(name, lambda m: masked.read_answer(m, present), message) for name, message in answers.items()
        }
        there = sorted(parts)
        questions = {}
        for name in there:
            shares = {other: parts[other].shares[name] for other in there}
            questions[name] = ({"attempt": attempt, "answered": there, "shares": shares}, {})
        gone, before = len(there) < len(present), self.exchange.sizes
        found = self.exchange.ask("unmask", step, questions, limit=agreement.JOIN_LIMIT, everyone=gone)
        self.exchange.sizes = (before[0] + self.exchange.sizes[0], before[1] + self.exchange.sizes[1])
        help_ = {name: _of(name, lambda m: masked.read_help(m, there, present), found[name]) for name in found}
        try:
            vectors = {name: part.vector for name, part in parts.items()}
            return unmask(vectors, help_, present, masked.threshold(len(present), self.spec.min_silos))
        except (WireError, ValueError) as error:
            raise InterruptedRunError(f"The sum of step {step} cannot be told ({error}).") from error

    def _replies(self, leg, listed, answers, silent):
        """The reply of each silo in order, and its part of the ELBO; of the absent those of a silent one."""
        squeezed = leg.algorithm.accumulates and self.spec.wire.loses(silent)

        def read(message):
            found = wire.unpack(self.spec.wire, message.arrays, silent, squeezed=squeezed)
            return found, agreement.elbo_term(message, disclosed=self.spec.disclose_elbo)

        pairs = [_of(name, read, answers[name]) if name in answers else (silent, 0.0) for name in listed]
        return [reply for reply, _ in pairs], [term for _, term in pairs]

    def _end(self, attempt, rounds, position, book, durable):
        """The end of an algorithm: silos settle their own part; then it counts as done."""
        shared = position.state.shared
        answers = self._tell("finish", attempt, position, rounds, durable)
        theta: dict[str, Any] = {}
        for name in sorted(answers):
            theta = _of(name, lambda answer, t=theta: agreement.joint_theta(t, answer, shared.theta), answers[name])
        for name in sorted(set(self.names) - set(answers)):
            log.warning("silo %s was not there at the end; sfvi.fit_silo gives it a posterior from the result", name)
        done = Finished(
            shared, theta, book.history, position.present, book.convergence, position.seconds, position.sizes
        )
        last = position.last | dict.fromkeys(answers, position.step)
        after = [*position.done, done]
        position = Position(position.leg + 1, position.step + 1, None, None, after, last, self._nobody(), 0.0, (0, 0))
        self.ledger.write(position)
        return position

    def _result(self, position):
        kinds = [leg.kind for leg in self.legs]
        main = kinds.index("main")
        way, end = position.done[: main + 1], position.done[main]
        chosen = self.legs[main].algorithm.elbo.options.local_family
        theta = self.model.constrain_theta(end.shared.theta, {}) | end.theta
        posterior = GlobalPosterior(self.model, end.shared, theta, chosen, self.agreed.bound, self.agreed.network)
        histories = [part.history for part in way]
        replicates = [part.shared.family for part in position.done[main + 1 :]]
        fit = Fit(
            posterior,
            {},
            joined_trace(histories),
            path=joined_path(self.model, histories),
            communication=self._communication(position.done),
            noise_error=noise_error(self.model, end.shared.family, replicates) if replicates else None,
            present=np.concatenate([part.present for part in way]),
            convergence=end.convergence,
            seconds=sum(part.seconds for part in position.done),
            fitted=self.names,
            provenance=self._provenance(len(end.history.elbo), end.shared.family),
        )
        fit.save(self.folder / "result")
        return fit

    def _provenance(self, rounds, family):
        options: Any = self.spec.chosen(self.code)
        names = ("name", "until_converged", "disclose_elbo", "secure_sum", "min_silos", "wire")
        settings = {name: getattr(self.spec, name) for name in names}
        settings |= {"num_rounds": plan.num_rounds(self.spec, options), "model": self.code.hash}
        found = provenance("deployed", options, self.spec.key, settings)
        pairs = zip(self.legs, self._broadcasts, strict=True)
        main = next(leg for leg in self.legs if leg.kind == "main")
        sizes = {"num_silos": len(self.names), "num_rounds": rounds}
        left = noise_left(main.algorithm.elbo.options, family, **sizes) if self.spec.min_silos is None else None
        return found._replace(
            sent=replies((leg.algorithm, leg.silent_like(like)) for leg, like in pairs),
            privacy=spent(main.algorithm.elbo.options, rounds, left),
        )

    def _communication(self, done):
        names = [type(leg.algorithm).__name__.removeprefix("Bound") for leg in self.legs]
        rows = [[name, len(part.history.elbo), *part.sizes] for name, part in zip(names, done, strict=True)]
        return pd.DataFrame(rows, columns=["algorithm", "rounds", "bytes to a silo", "bytes from a silo"])

    def _nobody(self):
        return np.zeros((0, len(self.names)), bool)


def _of(name, read, message):
    """Read a silo's message; what is wrong with it is said of the silo."""
    try:
        return read(message)
    except WireError as error:
        raise DeploymentError(f"What silo {name!r} answers cannot be used: {error}") from error


def _check_different(keys):
    """Two silos with one key are one silo twice, or one's folder is a copy of the other's: no sum would hide them."""
    known: dict[str, str] = {}
    for name, key in keys.items():
        if key in known:
            raise DeploymentError(
                f"Silos {known[key]!r} and {name!r} have the same key for secure sums: the folder of one is a copy of "
                "the other's. Delete the copied runs, its file `secret` at least, and start that silo again."
            )
        known[key] = name
