"""A silo's part of a secure sum: one answer for each moment, one list of who answered, and both on disk before."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from .. import archive
from ..errors import RefusalError, WireError
from ..privacy import Policy, Secret
from ..privacy.masking import Masked, Masking, Revealed
from .codec import Message

KIND = "masks of a run"


def threshold(num_silos: int, min_silos: int | None) -> int:
    """How many silos together can take a mask away that a silo has by itself: all who must be there to the end.

    The more, the fewer could do it with a server that tells them other things than the rest; more than half at least.
    """
    return max(num_silos // 2 + 1, min(num_silos, min_silos or num_silos))


def masking_of(name: str, secret: Secret, run: str) -> Masking:
    """A silo's keys: the public one is the same in all runs, so that others may know it; masks are not."""
    return Masking(name, secret.bytes("masking", 32), run)


class Masks:
    """The masks of one run.

    Args:
        masking: The silo's keys.
        keys: Public keys of all silos.
        path: Where it is remembered which masks were used: not in the run's folder, which may be deleted.
        policy: Of the silo.
        shared_by: How many silos make the noise of a sum together.
        min_silos: How many the run goes on with; None for all.
    """

    def __init__(
        self,
        masking: Masking,
        keys: dict[str, str],
        path: Path,
        policy: Policy,
        *,
        shared_by: int,
        min_silos: int | None,
    ):
        self._masking, self._keys, self._min_silos = masking, keys, min_silos
        self._least = max(policy.min_sum, shared_by)
        self._path = Path(path)

    def cover(
        self, values: Float[np.ndarray, " n"], *, attempt: int, step: int, among: tuple[str, ...], question: str
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The fields and arrays of an answer that only a sum can be read from.

        Args:
            values: The silo's summand.
            attempt: How often the server has begun.
            step: Number of the step.
            among: Who takes part.
            question: Digest of all that the summand depends on.
        """
        self._check_among(among)
        now = {"moment": [attempt, step], "question": question, "among": list(among), "revealed": None}
        known = self._known()
        if known is not None:
            if known["moment"] > now["moment"]:
                raise WireError(f"step {step} is over")
            if known["moment"] == now["moment"] and (known["question"], known["among"]) != (question, list(among)):
                raise RefusalError("one mask is not used twice: the server asks for another answer in the same step")
            if known["moment"] == now["moment"]:
                now["revealed"] = known["revealed"]
        masked = self._masking.mask(values, self._moment(now), self._among(among), self._threshold(among))
        self._keep(now)
        return {"shares": masked.shares}, {"masked": masked.vector}

    def reveal(self, message: Message) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What is needed for the sum of those who answered; asked again, only for the same."""
        asked, known = message.fields, self._known()
        answered: Any = asked.get("answered")
        shares: Any = asked.get("shares")
        texts = isinstance(answered, list) and all(isinstance(name, str) for name in answered)
        if (
            not texts
            or answered != sorted(set(answered))
            or not isinstance(shares, dict)
            or set(shares) != set(answered)
        ):
            raise WireError("a step is malformed: it must say who answered, and what they sent for it")
        if known is None or known["moment"] != [asked.get("attempt"), message.step]:
            raise WireError(f"it gave no masked answer in step {message.step}")
        among = known["among"]
        if not set(answered) <= set(among) or self._masking.name not in answered:
            raise WireError("a step is malformed: those who answered were not asked")
        least = max(self._threshold(among), self._least)
        if len(answered) < least:
            raise RefusalError(f"only {len(answered)} silos answered; it takes part in sums of at least {least}")
        if known["revealed"] not in (None, sorted(answered)):
            raise RefusalError("it has helped with the sum of others in this step; one step, one sum")
        self._keep({**known, "revealed": sorted(answered)})
        given = self._masking.reveal(answered, shares, self._moment(known), self._among(among))
        return {"shares": given.shares, "pairs": given.pairs}, {}

    def _check_among(self, among):
        if self._masking.name not in among or not set(among) <= set(self._keys) or list(among) != sorted(set(among)):
            raise WireError("a step is malformed: it must say who takes part")
        if len(among) < self._least:
            raise RefusalError(f"its policy asks for a sum of at least {self._least} silos")

    def _threshold(self, among):
        return threshold(len(among), self._min_silos)

    def _among(self, among):
        return {name: self._keys[name] for name in among}

    def _moment(self, now):
        return f"{now['moment']} {'|'.join(now['among'])}"

    def _known(self):
        return archive.read(self._path, kind=KIND)[1] if self._path.exists() else None

    def _keep(self, now):
        archive.write(self._path, {}, {**now, "kind": KIND})


def read_answer(message: Message, silos: Sequence[str]) -> Masked:
    """A silo's masked reply, from a message, checked."""
    shares, vector = message.fields.get("shares"), message.arrays.get("masked")
    if set(message.fields) != {"shares"} or not isinstance(shares, dict) or set(shares) != set(silos):
        raise WireError("its reply must have a share for every silo")
    if set(message.arrays) != {"masked"} or vector is None or vector.ndim != 1 or vector.dtype != np.int64:
        raise WireError("its reply is not masked")
    return Masked(vector, shares)


def read_help(message: Message, answered: Sequence[str], silos: Sequence[str]) -> Revealed:
    """What a silo gives to take masks away, from a message, checked."""
    shares, pairs = message.fields.get("shares"), message.fields.get("pairs")
    if not isinstance(shares, dict) or not isinstance(pairs, dict) or set(shares) != set(answered):
        raise WireError("it must give its share of everyone who answered")
    if set(pairs) != set(silos) - set(answered):
        raise WireError("it must give what it has with everyone who did not answer")
    for text in (*shares.values(), *pairs.values()):
        if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{32}|[0-9a-f]{64}", text):
            raise WireError("what it gives is malformed")
    return Revealed(shares, pairs)
