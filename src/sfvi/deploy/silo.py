"""The silo's side of a run: takes a message, works, remembers, and answers.

Every step is from a state that the server names (`base`) to a new one, so a round that comes twice, or again after a
crash of either side, gives the same reply and is applied once. What must outlive a crash is on the silo's disk before
the answer leaves (`mark`).
"""

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from .. import archive
from .._compile import calls_lapack, on_one_thread
from .._random import as_key
from ..bounds import Bound
from ..engines import batching
from ..engines.diagnosis import find_culprit
from ..engines.in_process import all_finite
from ..errors import RefusalError, SfviError, WireError
from ..families import Amortized
from ..network_identity import network_identity
from ..objectives import Shared
from ..posterior import GlobalPosterior, SiloPosterior
from ..privacy import Audit, Gate, Policy
from ..run_checks import (
    check_centred_sites,
    check_fixed_noise,
    check_network_of,
    check_networks,
    check_support,
    separation,
    settle_bound,
)
from . import agreement, plan, wire
from .code import Code
from .codec import Message, decode, encode, size_limit, unflatten
from .data import SiloInput
from .slots import Held, Slots
from .spec import RunSpec

log = logging.getLogger("sfvi")
RUN_KIND = "run at a silo"
POSTERIOR = "posterior.npz"
AUDIT = "audit.jsonl"


class Silo:
    """One silo, ready to take part in runs.

    Args:
        name: The silo.
        code: The model.
        source: Its data.
        folder: Where it remembers; a folder for each run.
        policy: What may leave it; by default what `Policy()` says.
    """

    def __init__(self, name: str, code: Code, source: SiloInput, folder: Path, policy: Policy | None = None):
        self.name, self.code, self.folder = name, code, Path(folder)
        self.gate = Gate(Policy() if policy is None else policy, Audit(self.folder / AUDIT))
        self.gate.check_model(code.hash)
        model = code.model
        self.data = model.silo_data(name, source.data, unit_ids=source.unit_ids, num_units=source.num_units)
        theta = model.initial_theta(jax.random.key(0), {name: self.data})
        check_support(theta, {name: self.data}, batching.plan(model, {name: self.data}, theta, merge=False))
        self.gate.check_data(self.data, theta)
        self._run: _Run | None = None

    def handle(self, request: bytes) -> bytes:
        """Answer a message; what is wrong with it, or with this silo, becomes a refusal with its reason."""
        run, step = "", -1
        try:
            limit = 0 if self._run is None else self._run.limit
            message = decode(request, limit=max(limit, agreement.JOIN_LIMIT))
            run, step = message.run, message.step
            fields, arrays = self._answer(message)
            answer = encode(Message(message.kind, run, self.code.hash, step, fields, arrays))
            about = {
                "run": run,
                "model": self.code.hash,
                "step": step,
                "size": len(answer),
                "request": _digest(message),
            }
            self.gate.leave(message.kind, fields, arrays, **about)
            return answer
        except Exception as error:
            log.error("refused: %s", error, exc_info=None if isinstance(error, SfviError) else error)
            reason = scrubbed(error)
            with contextlib.suppress(RefusalError):  # a record that cannot be kept is a reason to refuse already
                self.gate.audit.refused(run=run, step=step, reason=reason)
            return refusal(reason, run, step)

    def _answer(self, message):
        if message.model != self.code.hash:
            raise WireError("the server has another version of the model's code; install the same one everywhere")
        if message.kind == "join":
            return self._join(message)
        if message.kind == "begin":
            return self._begin(message)
        if message.kind not in ("start", "round", "finish"):
            raise WireError(f"a message of kind {message.kind!r} is unknown")
        if self._run is None or self._run.spec.name != message.run:
            self._run = self._remembered(message.run)
        return self._run.step(message)

    def _join(self, message):
        """Say whether, and with what, this silo can take part."""
        spec = agreement.check(message.fields, self.code)
        if spec.name != message.run or self.name not in spec.silos:
            raise WireError(f"the run {spec.name!r} does not name silo {self.name!r}")
        options: Any = spec.chosen(self.code)
        about = {"silos": spec.silos, "discloses_elbo": spec.disclose_elbo, "model": self.code.hash}
        self.gate.check_run(algorithm=spec.algorithm, rounds=plan.num_rounds(spec, options), **about)
        mine = {self.name: self.data}
        theta = self.code.model.initial_theta(as_key(spec.key), mine)
        check_centred_sites(self.code.model, mine)
        check_fixed_noise(options, self.code.model, mine)
        if check_network_of(options, self.name, self.data):
            check_networks(options, mine)
        if options.bound is not None:
            settle_bound(options, theta, {self.name: self.data})
        groups, tangled = separation(theta, {self.name: self.data})
        path = self._run_file(spec.name)
        if path.exists():
            _, known = archive.read(path, kind=RUN_KIND)
            if known["digest"] != spec.digest():
                raise RefusalError("it knows another run of this name; choose another name")
            if known["data"] != self.data.fingerprint():
                raise RefusalError(
                    "it began this run with other data; go on with what it began with, or begin a run of another name"
                )
        log.info("run %s: %s asks to join (attempt %d)", spec.name, spec.algorithm, message.fields["attempt"])
        network = network_identity(options.local_family, {self.name: self.data})
        units = float(self.data.num_units) if "num_units" in self.gate.policy.disclose else 1.0
        return agreement.Joined(units, groups, tangled, network, theta).write()

    def _begin(self, message):
        """Take what all have agreed on."""
        spec = agreement.check(message.fields, self.code)
        bound, theta = agreement.settled(message)
        path = self._run_file(spec.name)
        header = {"kind": RUN_KIND, "digest": spec.digest(), "spec": spec.to_json(), "bound": list(bound)}
        header |= {"data": self.data.fingerprint(), "model": self.code.hash, "theta": message.fields["theta"]}
        archive.write(path, message.arrays, header)
        if self._run is None or (self._run.spec.digest(), self._run.bound) != (spec.digest(), bound):
            self._run = _Run(self, spec, bound, theta)  # else it goes on with what it has compiled
        return {"versions": self._run.slots.versions}, {}

    def _remembered(self, run):
        """The run that an earlier process of this silo joined."""
        path = self._run_file(run)
        if not path.exists():
            raise WireError(f"this silo has not joined a run {run!r}")
        arrays, header = archive.read(path, kind=RUN_KIND)
        spec = RunSpec.from_json(header["spec"])
        theta = agreement.theta_tree(header["theta"], arrays)
        return _Run(self, spec, Bound(*header["bound"]), theta)

    def _run_file(self, run):
        return self.folder / run / "run.npz"


class _Run:
    """One run, as a silo sees it."""

    def __init__(self, silo: Silo, spec: RunSpec, bound: Bound, theta: Any):
        self.silo, self.spec, self.data = silo, spec, silo.data
        self.legs = plan.legs(spec, silo.code, bound)
        self.folder = silo.folder / spec.name
        self.bound = bound
        broadcasts = [leg.broadcast_like(theta, len(spec.silos)) for leg in self.legs]
        silents = [leg.silent_like(b) for leg, b in zip(self.legs, broadcasts, strict=True)]
        self._likes = list(zip(self.legs, broadcasts, silents, strict=True))
        self.limit = size_limit(*broadcasts)
        identity = {"run of this name": spec.digest(), "version of the model": silo.code.hash}
        identity |= {"data set": silo.data.fingerprint(), "precision": str(jnp.result_type(float))}
        self.slots = Slots(self.folder, identity, self._shapes)
        self._held: dict[int, Held] = {}
        self._latest = self.slots.latest
        self._answered: tuple[tuple, Any] | None = None
        self._compiled: dict[int, Any] = {}

    def step(self, message):
        """Do one step: a round, or the end of an algorithm."""
        order = agreement.Order.read(message)
        now = (order.attempt, message.step)
        if self._answered is not None and self._answered[0] == (now, order):
            return self._answered[1]
        if now < self._latest or order.base >= message.step:
            raise WireError(
                f"step {message.step} is over; this silo is at {self._latest[1]}: if the server has lost its folder, "
                "restore it, or begin a run of another name"
            )
        held = self._at(order.base)
        if order.leg >= len(self.legs) or (message.kind != "start" and (held.state is None or held.leg != order.leg)):
            raise WireError(f"step {message.step} belongs to an algorithm that did not start here")
        leg, broadcast_like, silent_like = self._likes[order.leg]
        broadcast = unflatten(broadcast_like, message.arrays, prefix="broadcast", dtype=self.spec.wire.broadcast)
        work = {"start": self._begin, "round": self._round, "finish": self._finish}[message.kind]
        new, answer = work(now, held._replace(leg=order.leg), leg, broadcast, silent_like)
        if order.mark:
            self.slots.write(new, keep=order.durable)
        self._held = {held.version: held, new.version: new}
        self._latest, self._answered = now, ((now, order), answer)
        return answer

    def _at(self, version):
        """The state after a step; before the first there is none."""
        if version == -1:
            return Held(-1, -1, 0, None, None, None)
        held = self._held.get(version) or self.slots.read(version)
        if held is None:
            there = sorted({*self._held, *self.slots.versions})
            raise RefusalError(
                f"it has no state of step {version} (it has {there or 'none'}): its folder was lost or is of another "
                "time; restore it, or begin a run of another name"
            )
        return held

    def _begin(self, now, held, leg, broadcast, silent_like):
        """The start of an algorithm, at its first broadcast, whoever takes part in the first round."""
        residual = None
        if leg.algorithm.accumulates and self.spec.wire.loses(silent_like):
            residual = jnp.zeros_like(ravel_pytree(leg.algorithm.silent(broadcast))[0])
        state = self._start(leg, held.handed, broadcast)
        return held._replace(version=now[1], attempt=now[0], state=state, residual=residual), ({}, {})

    def _round(self, now, held, leg, broadcast, silent_like):
        """A round of an algorithm."""
        del silent_like
        function = self._function(held.leg, leg, held.state, broadcast)
        state, reply, info = function(held.state, broadcast, self.data)
        if not (all_finite(reply) and all_finite(state)):
            self._broke(now, leg, held, broadcast)
        arrays, residual = wire.pack(self.spec.wire, reply, leg.algorithm.silent(broadcast), held.residual)
        fields = {"elbo": float(info.elbo_term)} if self.spec.disclose_elbo else {}
        return held._replace(version=now[1], attempt=now[0], state=state, residual=residual), (fields, arrays)

    def _start(self, leg, handed, broadcast):
        """The state before the first round of an algorithm."""
        algorithm, key = leg.algorithm, leg.silo_key

        @on_one_thread
        def start(handed, broadcast, data):
            if handed is None:
                return algorithm.silo_init(key, broadcast, data)
            return algorithm.silo_start(handed, broadcast, data)

        return start(handed, broadcast, self.data)

    def _function(self, number, leg, state, broadcast):
        """The compiled step of a leg."""
        if number not in self._compiled:
            algorithm, key = leg.algorithm, leg.silo_key

            @eqx.filter_jit
            def step(state, broadcast, data):
                return algorithm.silo_step(key, state, broadcast, data)

            def numbers(state, broadcast, data):
                return step(state, broadcast, data)[1]

            alone = calls_lapack(numbers, state, broadcast, self.data)
            self._compiled[number] = on_one_thread(step) if alone else step
        return self._compiled[number]

    def _finish(self, now, held, leg, broadcast, silent_like):
        """The end of an algorithm: settle the silo's own family, and keep it if it is the result."""
        del silent_like
        algorithm, key = leg.algorithm, leg.silo_key

        @on_one_thread
        def finish(state, broadcast, data):
            return algorithm.silo_finish(key, state, broadcast, data)

        family = finish(held.state, broadcast, self.data)
        theta = self._save(leg, broadcast, family) if leg.kind == "main" else {}
        handed = held.handed if leg.kind == "replicate" else family
        paths, arrays = agreement.theta_arrays(theta)
        return Held(now[1], now[0], held.leg, None, handed, None), ({"theta": paths}, arrays)

    def _save(self, leg, broadcast, family):
        """Write the silo's posterior, for the silo."""
        model, name, elbo = self.silo.code.model, self.silo.name, leg.algorithm.elbo
        own = set(model.initial_theta(as_key(0), {name: self.data}))
        shared = Shared(
            broadcast.shared.family,
            {param: value for param, value in broadcast.shared.theta.items() if param in own},
            broadcast.shared.network,
        )
        theta = model.constrain_theta(shared.theta, {name: self.data})
        chosen = elbo.options.local_family
        identity = network_identity(chosen, {name: self.data}) if isinstance(chosen, Amortized) else None
        posterior = GlobalPosterior(model, shared, theta, chosen, self.bound, identity)
        path = self.folder / POSTERIOR
        SiloPosterior(name, posterior, elbo.local(broadcast.shared, family, self.data), self.data).save(path)
        log.info("run %s: the posterior of silo %s is in %s", self.spec.name, name, path)
        return theta

    def _broke(self, now, leg, held, broadcast):
        """Say at which site a round broke: here with numbers, to the server without."""
        culprit = find_culprit(leg.algorithm, leg.silo_key, broadcast, {self.silo.name: (held.state, self.data)})
        log.error("step %d broke at site %r: %s", now[1], culprit.site, culprit.symptom)
        raise RefusalError(
            f"its step {now[1]} broke at site {culprit.site!r}; lower the step size, rescale the data or give that "
            "site a tighter prior"
        )

    def _shapes(self, number):
        leg, broadcast, silent = self._likes[number]
        start = eqx.filter_eval_shape(leg.algorithm.silo_init, leg.silo_key, broadcast, self.data)
        handed = eqx.filter_eval_shape(leg.algorithm.elbo.start_local, self.data)
        residual = eqx.filter_eval_shape(lambda tree: ravel_pytree(tree)[0], silent)
        return start, handed, residual


def _digest(message):
    """What a reply depends on beside the silo's own state: the same question, the same answer."""
    parts = [
        message.run,
        str(message.step),
        *(f"{name}{a.dtype}{a.shape}" for name, a in sorted(message.arrays.items())),
    ]
    digest = hashlib.blake2b("|".join(parts).encode(), digest_size=16)
    for _, array in sorted(message.arrays.items()):
        digest.update(array.tobytes())
    return digest.hexdigest()


def refusal(reason: str, run: str = "", step: int = -1) -> bytes:
    """A silo's answer that it will not, and why."""
    return encode(Message("refused", run, "", step, {"reason": reason}, {}))


def scrubbed(error: Exception) -> str:
    """What may be said outside of an error: of data, paths and whatever others wrote into its text, nothing."""
    if isinstance(error, WireError | RefusalError):
        return str(error).removesuffix(".")
    if isinstance(error, OSError):
        return f"it cannot use its files ({os.strerror(error.errno or 0)}); its own log says more"
    return f"its data, options or program cannot be used ({type(error).__name__}); its own log says why"
