"""Asking silos and waiting for them: who is needed, who is late, who is lost."""

import logging
import time
from typing import Any, NamedTuple, Protocol

from ..errors import DeploymentError, WireError
from .code import Code
from .codec import MAX_HEADER, Message, decode, encode
from .spec import RunSpec
from .status import Reporter

log = logging.getLogger("sfvi")
LOOK_EVERY = 0.5  # seconds between two looks at the clock while waiting
SAY_EVERY = 10.0  # seconds between two messages about who is waited for
TRY_AGAIN = 1.0  # seconds before a silo that could not be reached is asked again


class Lost(NamedTuple):
    """What a transport gives instead of an answer.

    Attributes:
        reason: Why there is none.
        gone: Whether the silo cannot be reached any more in this attempt.
    """

    reason: str
    gone: bool


class InterruptedRunError(DeploymentError):
    """The attempt is over, the run is not: begin it again and it goes on."""


class Transport(Protocol):
    """Carries bytes to silos and back.

    Attributes:
        forgetful: Whether silos are new processes for every message, and so must keep everything on disk.
    """

    @property
    def forgetful(self) -> bool:
        """See above."""
        ...

    def send(self, name: str, request: bytes) -> None:
        """Hand over a message to a silo; returns at once."""
        ...

    def receive(self, timeout: float) -> tuple[str, bytes | Lost] | None:
        """The next answer of any silo, or None if there is none for so many seconds."""
        ...


class Exchange:
    """One question to many silos at a time.

    Attributes:
        transport: Carries the messages.
        sizes: Bytes of the last request to, and answer from, one silo.
        latest: Who answered the last question.
    """

    def __init__(self, transport: Transport, spec: RunSpec, code: Code, report: Reporter):
        self.transport, self.sizes, self.latest = transport, (0, 0), []
        self._spec, self._code, self._report = spec, code, report
        self._busy: set[str] = set()  # still at an earlier question
        self._gone: dict[str, str] = {}
        self._said: set[tuple[str, str]] = set()

    def ask(
        self,
        kind: str,
        step: int,
        questions: dict[str, tuple[dict[str, Any], dict[str, Any]]],
        *,
        limit: int,
        everyone: bool = False,
    ) -> dict[str, Message]:
        """Ask silos and gather their answers: all, or with `min_silos` those that come in time.

        Args:
            kind: Of the message.
            step: Its number.
            questions: For each silo fields and arrays.
            limit: Bytes of an answer at most.
            everyone: Whether all must answer, whatever `min_silos` says.
        """
        late = self._spec.deadline if kind == "finish" else self._spec.late  # the end is worth waiting for
        needed = len(questions) if everyone else self._spec.min_silos or len(questions)
        wanted = _Wanted(min(needed, len(questions)), questions, self._gone, late)
        requests = {
            name: encode(Message(kind, self._spec.name, self._code.hash, step, fields, arrays))
            for name, (fields, arrays) in questions.items()
        }
        retry = dict.fromkeys(wanted.open, 0.0)
        answers: dict[str, Message] = {}
        begin = said = time.monotonic()
        while not wanted.settled(answers, time.monotonic()):
            now = time.monotonic()
            for name in [name for name, due in retry.items() if due <= now and name not in self._busy]:
                del retry[name]
                self._busy.add(name)
                self.transport.send(name, requests[name])
            item = self.transport.receive(LOOK_EVERY)
            if item is not None:
                self._take(item, kind, step, wanted, answers, retry, limit)
            now = time.monotonic()
            missing = sorted(wanted.open)
            if missing and now - said > SAY_EVERY:
                said = now
                log.info("%s: waiting for %s", _phrase(kind, step), ", ".join(missing))
                self._report.waiting(missing)
            if now - begin > self._spec.deadline:
                if wanted.enough(answers):
                    break
                raise DeploymentError(
                    f"No answer from {', '.join(map(repr, missing))} within {self._spec.deadline:g} seconds "
                    f"({_phrase(kind, step)}); nothing is lost: start them again, and the run once more under its name."
                )
        if answers:
            some = min(answers)
            self.sizes = (len(requests[some]), self.sizes[1])
        self.latest = sorted(answers)
        return dict(sorted(answers.items()))

    def _take(self, item, kind, step, wanted, answers, retry, limit):
        name, answer = item
        self._busy.discard(name)
        if isinstance(answer, Lost):
            if (name, answer.reason) not in self._said:  # it is asked every second
                log.warning("silo %s cannot be reached: %s", name, answer.reason)
            self._said.add((name, answer.reason))
            if answer.gone:
                self._gone[name] = answer.reason
                self._report.lost(sorted(self._gone))
                wanted.leave(name, answers)
            elif name in wanted.open:
                retry[name] = time.monotonic() + TRY_AGAIN
            return
        message = self._read(name, answer, limit)
        if (message.kind, message.step) != (kind, step) or name not in wanted.open:
            log.info("silo %s was late with step %d; it goes on with the next", name, message.step)
            if name in wanted.open:
                retry[name] = 0.0
            return
        answers[name] = message
        self._said = {each for each in self._said if each[0] != name}
        wanted.open.discard(name)
        self.sizes = (self.sizes[0], len(answer))

    def _read(self, name, answer, limit):
        try:
            message = decode(answer, limit=max(limit, MAX_HEADER))
        except WireError as error:
            raise DeploymentError(f"What silo {name!r} answers cannot be read: {error}") from error
        if message.kind == "refused":
            raise DeploymentError(f"Silo {name!r} refuses: {message.fields.get('reason')}.")
        if message.run != self._spec.name or message.model != self._code.hash:
            raise DeploymentError(f"Silo {name!r} answers for another run or model.")
        return message


def _phrase(kind, step):
    """What is waited for, in words."""
    words = {"join": "before the first round", "begin": "before the first round", "start": "the start, which compiles"}
    return words.get(kind) or ("the end, each silo's own refit" if kind == "finish" else f"step {step}")


class _Wanted:
    """Whose answers are still open, and when they no longer matter."""

    def __init__(self, needed, questions, gone, late):
        self.open = {name for name in questions if name not in gone}
        self._needed, self._late, self._since = needed, late, None
        if len(self.open) < self._needed:
            name = min(gone)
            raise InterruptedRunError(f"Silo {name!r} is gone ({gone[name]}).")

    def enough(self, answers):
        """Whether as many have answered as are needed."""
        return len(answers) >= self._needed

    def leave(self, name, answers):
        """Do without a silo, if that is allowed."""
        self.open.discard(name)
        if len(answers) + len(self.open) < self._needed:
            raise InterruptedRunError(f"Silo {name!r} is gone.")

    def settled(self, answers, now):
        """Whether all have answered, or enough, and the others had their time."""
        if not self.open:
            return True
        if not self.enough(answers):
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= self._late
