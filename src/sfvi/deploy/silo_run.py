"""A run as a silo takes part in it: every step is from a state that the server names (`base`) to a new one.

So a round that comes twice, or again after a crash of either side, gives the same reply and is applied once. What must
outlive a crash is on the silo's disk before the answer leaves (`mark`).
"""

import dataclasses
import hashlib
import logging
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from .._compile import calls_lapack
from .._random import as_key
from ..algorithms import UnitPrivacy
from ..bounds import Bound
from ..engines.diagnosis import find_culprit
from ..engines.in_process import all_finite
from ..engines.units import take_apart
from ..errors import OptionError, RefusalError, WireError
from ..families import Amortized
from ..model import SiloData
from ..network_identity import network_identity
from ..objectives import Shared
from ..posterior import GlobalPosterior, SiloPosterior
from ..privacy import Gate, Secret
from . import agreement, plan, sums, wire
from .code import Code
from .codec import size_limit, unflatten
from .masked import Masks, masking_of
from .slots import Held, Slots
from .spec import RunSpec

log = logging.getLogger("sfvi")
POSTERIOR = "posterior.npz"
MASKS = "masks"
COMPUTES = ("sfvi", "jax", "jaxlib", "numpyro")


def versions() -> tuple[str, ...]:
    """What computes replies here: by others the same question might get an answer with other last digits."""
    return (*(f"{name} {version(name)}" for name in COMPUTES), jax.default_backend(), platform.machine())


class Own(NamedTuple):
    """What a silo has, whatever the run.

    Attributes:
        name: The silo.
        code: The model.
        data: Its data, as the model sees them.
        agreed_units: Whether their number is one that was agreed on.
        folder: Where it remembers; a folder for each run.
        gate: Its policy, and the record of what left.
        secret: From which its noise and its masks follow.
    """

    name: str
    code: Code
    data: SiloData
    agreed_units: bool
    folder: Path
    gate: Gate
    secret: Secret

    def told_units(self, privacy: Any) -> float:
        """The number of units that is told, and counts: with differential privacy only one that was agreed on."""
        told = "num_units" in self.gate.policy.disclose and (privacy is None or self.agreed_units)
        return float(self.data.num_units) if told else 1.0

    def apart(self, privacy: Any, theta: Any) -> SiloData:
        """The silo's data, with its units apart if each of them is to be protected."""
        if not isinstance(privacy, UnitPrivacy):
            return self.data
        try:
            return take_apart(self.code.model, self.name, self.data, theta)
        except OptionError as error:
            log.error("%s", error)
            raise RefusalError("its program or data do not let each unit be protected; its own log says why") from error


class _Done(NamedTuple):
    """A step: when, what was asked, the states before and after it, the answer, and a digest of all it depends on."""

    now: tuple[int, int]
    order: agreement.Order
    held: Held
    new: Held
    answer: Any
    question: str


class SiloRun:
    """One run, as a silo sees it.

    Args:
        own: What the silo has.
        spec: The run.
        bound: What is maximized.
        theta: The initial parameters of all programs.
        keys: Public keys of the silos for secure sums; none without them.
    """

    def __init__(self, own: Own, spec: RunSpec, bound: Bound, theta: Any, keys: dict[str, str]):
        self._own, self.spec = own, spec
        self.legs = plan.legs(spec, own.code, bound)
        privacy = self.legs[-1].algorithm.elbo.options.privacy
        # at the silo's own values: those of the server might make units look separate that are not
        self.data = own.apart(privacy, own.code.model.initial_theta(as_key(spec.key), {own.name: own.data}))
        told = jnp.asarray(own.told_units(privacy), self.data.num_units.dtype)
        self.data = dataclasses.replace(self.data, num_units=told)  # as the others count it
        whole = [spec.digest(), str(bound), own.data.fingerprint(), own.code.hash, str(told.dtype)]
        if privacy is not None:  # another secret makes other noise, which counts again; so do other last digits
            whole += [own.secret.bytes("which secret", 16).hex(), *versions()]
        self._whole = "|".join(whole)
        self._shares_noise = privacy is not None and privacy.shared_by > 1
        self.folder = own.folder / spec.name
        self.bound = bound
        self._masks = None
        if keys:
            masking = masking_of(own.name, own.secret, spec.digest())
            needed = {"shared_by": 1 if privacy is None else privacy.shared_by, "min_silos": spec.min_silos}
            self._masks = Masks(masking, keys, own.folder / MASKS / f"{spec.name}.npz", own.gate.policy, **needed)
        broadcasts = [leg.broadcast_like(theta, len(spec.silos)) for leg in self.legs]
        silents = [leg.silent_like(b) for leg, b in zip(self.legs, broadcasts, strict=True)]
        self._likes = list(zip(self.legs, broadcasts, silents, strict=True))
        self.limit = size_limit(*broadcasts)
        identity = {"run of this name": spec.digest(), "version of the model": own.code.hash}
        identity |= {"data set": own.data.fingerprint(), "precision": str(jnp.result_type(float))}
        self.slots = Slots(self.folder, identity, self._shapes)
        self._held: dict[int, Held] = {}
        self._latest = self.slots.latest
        self._pending: _Done | None = None
        self._answered: _Done | None = None
        self._compiled: dict[int, Any] = {}

    def step(self, message):
        """Do one step: a round, or the end of an algorithm; it counts once it is settled."""
        order = agreement.Order.read(message)
        now = (order.attempt, message.step)
        self._pending = None
        if self._answered is not None and (self._answered.now, self._answered.order) == (now, order):
            return self._answered.answer
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
        # beside other answers of the others a share of noise would become known, so it is new in every attempt
        question = _question(f"{self._whole}|{order.attempt if self._shares_noise else ''}", message, order, held)
        if leg.algorithm.elbo.options.privacy is not None:  # noise that the server cannot tell
            leg = leg._replace(silo_key=self._own.secret.key(question))
            if message.kind == "round":
                self._own.gate.check_reply(self._own.code.hash, question, self.release(message))
        about = (order, message.step, question)
        new, answer = work(about, held._replace(leg=order.leg), leg, broadcast, silent_like)
        self._pending = _Done(now, order, held, new, answer, question)
        return answer

    def settle(self) -> None:
        """The last answer may leave: what it was computed with is kept."""
        if self._pending is None:
            return
        done, self._pending = self._pending, None
        if done.order.mark:
            self.slots.write(done.new, keep=done.order.durable)
        self._held = {done.held.version: done.held, done.new.version: done.new}
        self._latest, self._answered = done.now, done

    def forget(self) -> None:
        """The last answer, which may not leave, and all that came of it."""
        self._pending = self._answered = None

    @property
    def question(self) -> str:
        """What the last answer answers."""
        done = self._pending or self._answered
        return "" if done is None else done.question

    def unmask(self, message):
        """Help with the sum of a round that was answered."""
        if self._masks is None:
            raise WireError("this run has no secure sums")
        return self._masks.reveal(message)

    def release(self, message):
        """The noise in the reply to a message."""
        privacy = self.legs[agreement.Order.read(message).leg].algorithm.elbo.options.privacy
        return None if privacy is None else privacy.releases_of_units(1)

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

    def _begin(self, about, held, leg, broadcast, silent_like):
        """The start of an algorithm, at its first broadcast, whoever takes part in the first round."""
        order, step, _ = about
        residual = None
        if leg.algorithm.accumulates and self._masks is None and self.spec.wire.loses(silent_like):
            residual = jnp.zeros_like(ravel_pytree(leg.algorithm.silent(broadcast))[0])
        state = leg.compiled.start(leg.silo_key, held.handed, broadcast, self.data)
        return held._replace(version=step, attempt=order.attempt, state=state, residual=residual), ({}, {})

    def _round(self, about, held, leg, broadcast, silent_like):
        """A round of an algorithm."""
        del silent_like
        order, step, question = about
        function = self._function(held.leg, leg, held.state, broadcast)
        state, reply, info = function(leg.silo_key, held.state, broadcast, self.data)
        if not (all_finite(reply) and all_finite(state)):
            if leg.algorithm.elbo.options.privacy is None:
                self._broke(step, leg, held, broadcast)
            log.error("step %d broke; what is not finite is sent as zero, and nothing changes here", step)
            reply, state = _finite(reply), held.state
        new = held._replace(version=step, attempt=order.attempt, state=state)
        elbo = float(info.elbo_term) if self.spec.disclose_elbo else None
        if self._masks is not None:
            weight = self._weight(order, leg, broadcast)
            units = float(self.data.num_units)
            values = sums.outgoing(leg.algorithm, reply, weight=weight, num_units=units, elbo=elbo or 0.0)
            moment = {"attempt": order.attempt, "step": step, "among": order.among}
            return new, self._masks.cover(values, **moment, question=question)
        arrays, residual = wire.pack(self.spec.wire, reply, leg.algorithm.silent(broadcast), held.residual)
        return new._replace(residual=residual), ({} if elbo is None else {"elbo": elbo}, arrays)

    def _weight(self, order, leg, broadcast):
        """By what this silo's reply counts, drawn here as at the server, whose word is not taken for it."""
        rule = leg.algorithm.elbo.options.participation
        number = broadcast.round if rule.partial else jnp.zeros((), jnp.int32)  # not every broadcast has one
        drawn = rule.draw(leg.server_key, number, len(self.spec.silos))
        weights = {self.spec.silos[int(i)]: float(w) for i, w in zip(*map(np.asarray, drawn), strict=True)}
        if order.among != tuple(sorted(name for name, weight in weights.items() if weight > 0)):
            raise WireError("a step is malformed: others take part than were drawn")
        return weights[self._own.name]

    def _function(self, number, leg, state, broadcast):
        """The compiled step of a leg."""
        if number not in self._compiled:

            def numbers(key, state, broadcast, data):
                return leg.compiled.step(key, state, broadcast, data)[1]

            alone = calls_lapack(numbers, leg.silo_key, state, broadcast, self.data)
            self._compiled[number] = leg.compiled.step_on_one_thread if alone else leg.compiled.step
        return self._compiled[number]

    def _finish(self, about, held, leg, broadcast, silent_like):
        """The end of an algorithm: settle the silo's own family, and keep it if it is the result."""
        del silent_like
        order, step, _ = about
        family = leg.compiled.finish(leg.silo_key, held.state, broadcast, self.data)
        theta = self._save(leg, broadcast, family) if leg.kind == "main" else {}
        handed = held.handed if leg.kind == "replicate" else family
        paths, arrays = agreement.theta_arrays(theta)
        return Held(step, order.attempt, held.leg, None, handed, None), ({"theta": paths}, arrays)

    def _save(self, leg, broadcast, family):
        """Write the silo's posterior, for the silo."""
        model, name, elbo = self._own.code.model, self._own.name, leg.algorithm.elbo
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

    def _broke(self, step, leg, held, broadcast):
        """Say at which site a round broke: here with numbers, to the server without."""
        culprit = find_culprit(leg.algorithm, leg.silo_key, broadcast, {self._own.name: (held.state, self.data)})
        log.error("step %d broke at site %r: %s", step, culprit.site, culprit.symptom)
        raise RefusalError(
            f"its step {step} broke at site {culprit.site!r}; lower the step size, rescale the data or give that "
            "site a tighter prior"
        )

    def _shapes(self, number):
        leg, broadcast, silent = self._likes[number]
        start = eqx.filter_eval_shape(leg.algorithm.silo_init, leg.silo_key, broadcast, self.data)
        handed = eqx.filter_eval_shape(leg.algorithm.elbo.start_local, self.data)
        residual = eqx.filter_eval_shape(lambda tree: ravel_pytree(tree)[0], silent)
        return start, handed, residual


def _finite(reply):
    """Numbers that are, and zero where they are not; with noise a server is not told which."""
    return jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0.0), reply)


def _question(whole, message, order, held):
    """All that a reply depends on, the silo's own state included: the same question, the same answer and noise.

    Without the state a server could go back, lead the silo another way, and ask again: two answers with one noise.
    """
    parts = [whole, message.run, message.kind, str(message.step), str(order.leg), str(order.base)]
    question = hashlib.blake2b("|".join(parts).encode(), digest_size=16)
    for name, array in sorted(message.arrays.items()):
        question.update(f"{name}{array.dtype}{array.shape}".encode() + array.tobytes())
    for leaf in jax.tree.leaves((held.state, held.residual)):
        question.update(np.asarray(leaf).tobytes())
    return question.hexdigest()
