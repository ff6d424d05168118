"""The silo's door: takes a message, answers it or refuses, and lets nothing else out.

What an answer is made of follows from the run (`silo_run.py`); whether it may leave, from the silo's own policy.
"""

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import jax

from .. import archive
from .._random import as_key
from ..algorithms import SFVIAvg
from ..algorithms.participation import ByRule
from ..bounds import Bound
from ..engines import batching
from ..errors import RefusalError, SfviError, WireError
from ..network_identity import network_identity
from ..privacy import Audit, Gate, Policy, Secret
from ..privacy.record import Chain, read
from ..run_checks import (
    check_centred_sites,
    check_fixed_noise,
    check_network_of,
    check_networks,
    check_support,
    separation,
    settle_bound,
)
from . import agreement, plan
from .code import Code
from .codec import Message, decode, encode
from .data import SiloInput
from .masked import masking_of
from .silo_run import Own, SiloRun
from .spec import NAME, RunSpec

log = logging.getLogger("sfvi")
RUN_KIND = "run at a silo"
AUDIT, SECRET = "audit.jsonl", "secret"
STEPS = ("start", "round", "finish")


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
        self.name, self.code = name, code
        self._folder, self._secret = Path(folder), Secret(Path(folder) / SECRET)
        self.gate = Gate(Policy() if policy is None else policy, record_of(self._folder))
        self.gate.check_model(code.hash)
        self.gate.check_record()
        model = code.model
        data = model.silo_data(name, source.data, unit_ids=source.unit_ids, num_units=source.num_units)
        theta = model.initial_theta(jax.random.key(0), {name: data})
        check_support(theta, {name: data}, batching.plan(model, {name: data}, theta, merge=False))
        self.gate.check_data(data, theta)
        self._data = data
        self._own = Own(name, code, data, source.num_units is not None, self._folder, self.gate, self._secret)
        self._run: SiloRun | None = None

    @property
    def public_key(self) -> str:
        """By which other silos may know it in secure sums; made when it is first asked for."""
        return public_key(self._folder)

    def handle(self, request: bytes) -> bytes:
        """Answer a message; what is wrong with it, or with this silo, becomes a refusal with its reason."""
        run, step = "", -1
        try:
            limit = 0 if self._run is None else self._run.limit
            message = decode(request, limit=max(limit, agreement.JOIN_LIMIT))
            run, step = message.run, message.step
            self.gate.audit.begin()
            fields, arrays = self._answer(message)
            answer = encode(Message(message.kind, run, self.code.hash, step, fields, arrays))
            about: dict[str, Any] = {"run": run, "model": self.code.hash, "step": step, "size": len(answer)}
            if message.kind == "round" and self._run is not None:
                about |= {"request": self._run.question, "release": self._run.release(message)}
            self._leave(message.kind, fields, arrays, about)
            return answer
        except Exception as error:
            log.error("refused: %s", error, exc_info=None if isinstance(error, SfviError) else error)
            reason = scrubbed(error)
            with contextlib.suppress(RefusalError):  # a record that cannot be kept is a reason to refuse already
                self.gate.audit.refused(run=run, step=step, reason=reason)
            return refusal(reason, run, step)

    def _leave(self, kind, fields, arrays, about):
        """Let an answer out, if it may; only then does the step count that made it."""
        try:
            self.gate.leave(kind, fields, arrays, **about)
        except RefusalError:
            if self._run is not None:
                self._run.forget()
            raise
        if kind in STEPS and self._run is not None:
            self._run.settle()

    def _answer(self, message):
        if message.model != self.code.hash:
            raise WireError("the server has another version of the model's code; install the same one everywhere")
        if message.kind == "join":
            return self._join(message)
        if message.kind == "begin":
            return self._begin(message)
        if message.kind not in (*STEPS, "unmask"):
            raise WireError(f"a message of kind {message.kind!r} is unknown")
        if self._run is None or self._run.spec.name != message.run:
            self._run = self._remembered(message.run)
        return self._run.unmask(message) if message.kind == "unmask" else self._run.step(message)

    def _join(self, message):
        """Say whether, and with what, this silo can take part."""
        spec, options, privacy = self._check(message)
        mine = {self.name: self._data}
        theta = self.code.model.initial_theta(as_key(spec.key), mine)
        _ = self._own.apart(privacy, theta)
        check_centred_sites(self.code.model, mine)
        check_fixed_noise(options, self.code.model, mine)
        if check_network_of(options, self.name, self._data):
            check_networks(options, mine)
        if options.bound is not None:
            settle_bound(options, theta, mine)
        groups, tangled = separation(theta, mine)
        log.info("run %s: %s asks to join (attempt %d)", spec.name, spec.algorithm, message.fields["attempt"])
        network = network_identity(options.local_family, mine)
        key = masking_of(self.name, self._secret, spec.digest()).public if spec.secure_sum else None
        return agreement.Joined(self._own.told_units(privacy), groups, tangled, network, theta, key).write()

    def _check(self, message):
        """The run that a message describes, if it may be; asked to join and to begin, whatever came before."""
        spec = agreement.check(message.fields, self.code)
        if spec.name != message.run or self.name not in spec.silos:
            raise WireError(f"the run {spec.name!r} does not name silo {self.name!r}")
        options, privacy = self._allowed(spec)
        known = self._known(spec.name)
        if known is not None and known["digest"] != spec.digest():
            raise RefusalError("it knows another run of this name; choose another name")
        if known is not None and known["data"] != self._data.fingerprint():
            raise RefusalError(
                "it began this run with other data; go on with what it began with, or begin a run of another name"
            )
        return spec, options, privacy

    def _allowed(self, spec):
        """The options of a run, and its privacy, if the policy allows it."""
        options: Any = spec.chosen(self.code)
        rounds = plan.num_rounds(spec, options)
        privacy = None if options.privacy is None else options.privacy.planned(rounds)
        about = {"silos": spec.silos, "discloses_elbo": spec.disclose_elbo, "model": self.code.hash, "run": spec.name}
        about |= {"secure_sum": spec.secure_sum, "min_silos": spec.min_silos}
        self.gate.check_run(algorithm=spec.algorithm, rounds=rounds, privacy=privacy, **about)
        uneven = isinstance(options, SFVIAvg) or isinstance(options.participation, ByRule)
        if privacy is not None and privacy.shared_by > 1 and uneven:
            raise RefusalError(
                "silos that share their noise must all count the same in a sum; run SFVI, without a participation rule"
            )
        return options, privacy

    def _known(self, run):
        """What is remembered of a run; None if nothing."""
        path = self._run_file(run)
        return archive.read(path, kind=RUN_KIND)[1] if path.exists() else None

    def _begin(self, message):
        """Take what all have agreed on."""
        spec, options, _ = self._check(message)
        bound, theta = agreement.settled(message)
        path, known = self._run_file(spec.name), self._known(spec.name)
        if known is not None and known["bound"] != list(bound):
            raise RefusalError("the server gives another bound than when the run began")
        if known is None and bound not in self._bounds(options, spec):
            raise RefusalError("the server gives a bound that neither the run nor this silo has chosen")
        header = {"kind": RUN_KIND, "digest": spec.digest(), "spec": spec.to_json(), "bound": list(bound)}
        header |= {"data": self._data.fingerprint(), "model": self.code.hash, "theta": message.fields["theta"]}
        header["keys"] = self._keys(message, spec, known)
        archive.write(path, message.arrays, header)
        if self._run is None or (self._run.spec.digest(), self._run.bound) != (spec.digest(), bound):
            self._run = SiloRun(
                self._own, spec, bound, theta, header["keys"]
            )  # else it goes on with what it has compiled
        return {"versions": self._run.slots.versions}, {}

    def _bounds(self, options, spec):
        """What may be maximized: what the run says, or else the ELBO or what suits this silo."""
        if options.bound is not None:
            return [options.bound]
        mine = {self.name: self._data}
        return [Bound(), settle_bound(options, self.code.model.initial_theta(as_key(spec.key), mine), mine).bound]

    def _keys(self, message, spec, known):
        """The silos' keys for secure sums: as the policy knows them, and the same as when the run began."""
        keys = agreement.keys_of(message, spec.silos)
        if spec.secure_sum != bool(keys):
            raise WireError("a message is malformed: keys belong to secure sums, and to nothing else")
        if keys:
            masking = masking_of(self.name, self._secret, spec.digest())
            if keys[self.name] != masking.public:
                raise RefusalError("the server gives another key of this silo than its own")
            masking.meet(keys)
        self.gate.check_keys(keys, self.name)
        if known is not None and known["keys"] != keys:
            raise RefusalError("the server gives other keys of the silos than when the run began")
        return keys

    def _remembered(self, run):
        """The run that an earlier process of this silo joined, if its policy still allows it."""
        path = self._run_file(run)
        if not NAME.fullmatch(run) or not path.exists():  # the name comes from outside
            raise WireError(f"this silo has not joined a run {run!r}")
        arrays, header = archive.read(path, kind=RUN_KIND)
        spec = RunSpec.from_json(header["spec"])
        self._allowed(spec)
        self.gate.check_keys(header["keys"], self.name)
        theta = agreement.theta_tree(header["theta"], arrays)
        return SiloRun(self._own, spec, Bound(*header["bound"]), theta, header["keys"])

    def _run_file(self, run):
        return self._folder / run / "run.npz"


def record_of(folder: Path) -> Audit:
    """The record of what left a silo. It is there before the silo's secret is, so where that is, it must be too."""
    if (folder / SECRET).exists() and not (folder / AUDIT).exists():
        raise RefusalError(
            "its record of what left is gone, so nothing leaves; restore it from a backup, then start the silo again"
        )
    return Audit(folder / AUDIT)


def chain_of(folder: Path) -> Chain:
    """The same to look at, whole or not; one that is gone is broken at its first line."""
    if (folder / SECRET).exists() and not (folder / AUDIT).exists():
        return Chain([], [], 1, "the file is gone", 0)
    return read(folder / AUDIT)


def public_key(folder: Path) -> str:
    """The key by which others may know the silo in secure sums; made, after its record, when first asked for."""
    record_of(folder).begin()
    return masking_of("", Secret(folder / SECRET), "").public


def refusal(reason: str, run: str = "", step: int = -1) -> bytes:
    """A silo's answer that it will not, and why."""
    return encode(Message("refused", run, "", step, {"reason": reason}, {}))


def log_refusal(error: Exception) -> None:
    """Say why this silo cannot take part; with a traceback only if the sentence is not ours."""
    log.error("this silo cannot take part: %s", error, exc_info=None if isinstance(error, SfviError) else error)


def scrubbed(error: Exception) -> str:
    """What may be said outside of an error: of data, paths and whatever others wrote into its text, nothing."""
    if isinstance(error, WireError | RefusalError):
        return str(error).removesuffix(".")
    if isinstance(error, OSError):
        return f"it cannot use its files ({os.strerror(error.errno or 0)}); its own log says more"
    return f"its data, options or program cannot be used ({type(error).__name__}); its own log says why"
