"""A silo's own rules about what may leave it, from a file that only the silo writes.

    models = ["9f2c41d07a3b"]    # hashes of the model's code, as `sfvi silo start` prints them; without: any
    algorithms = ["SFVI", "Sites"]  # without: any
    disclose = ["num_units", "theta"]  # beside replies; "elbo" is not told unless it stands here
    max_rounds = 2000            # replies in all runs of one model together; without: any number
    min_units = 20               # fewer units than these take part in nothing
    min_rows = 3                 # observations of each unit with latents of its own, at least
    min_silos = 3                # in a run: with two, each can subtract itself from a sum
    epsilon = 2.0                # differential privacy that all runs together may cost; without: none is asked for
    delta = 1e-6                 # the probability with which its promise may fail
    max_shared_by = 1            # silos that may make the noise together: more only if they can be trusted
    secure_sum = true            # only runs in which nobody sees this silo's replies, but their sum
    min_sum = 3                  # of how many silos such a sum must be at least
    peers = { north = "3f…" }    # the other silos' keys for such sums, as `sfvi silo key` prints them there

A run that the policy does not allow is refused when it asks to join, before anything else has left; a message that
holds anything else than it may is not sent. What the file does not know, or cannot be read, is refused too.
"""

import dataclasses
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..accountant import MOST_DELTA
from ..algorithms import SFVI, SFVIAvg, Sites
from ..errors import OptionError

TOLD = ("num_units", "theta", "elbo")
ALGORITHMS = {kind.__name__: kind for kind in (SFVI, SFVIAvg, Sites)}
WHY = {"min_sum": ", since a sum of one silo is its reply; below three protects from the server alone"}
HASH = 12  # characters of a hash at least
WHOLE_KEY = re.compile("[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """See above; the defaults are those of a silo without a file.

    Args:
        models: Beginnings of the allowed hashes of models' code; None for whatever the silo itself has installed.
        algorithms: Allowed algorithms, by the names in `ALGORITHMS` or as module:object of a model's package; None for
            all.
        disclose: What may be told beside replies: "num_units" (else the silo says 1), "theta" (starting and final
            values of its program's parameters; without it programs with parameters are refused), "elbo".
        max_rounds: Different replies, over all runs of a model; None for any number.
        min_units: Units of the silo at least.
        min_rows: Observations of each unit with latents at least.
        min_silos: Silos of a run at least.
        epsilon: The privacy budget of the silo's data, over all runs and models that its record knows of. Runs without
            differential privacy are then refused; None for no budget.
        delta: With it.
        max_shared_by: With it: how many silos may make the noise of a run together. Alone each makes less of it than
            the budget counts, so the others must be trusted; 1 for no one else.
        secure_sum: Whether replies may leave only where they are added up before anyone sees them.
        min_sum: Silos in such a sum at least: with two, each can subtract itself, and only the server sees no reply.
        peers: Keys of other silos, whole; without them the server's word is taken for whose they are.
    """

    models: tuple[str, ...] | None = None
    algorithms: tuple[str, ...] | None = None
    disclose: tuple[str, ...] = ("num_units", "theta")
    max_rounds: int | None = None
    min_units: int = 1
    min_rows: int = 0
    min_silos: int = 1
    epsilon: float | None = None
    delta: float = 1e-5
    max_shared_by: int = 1
    secure_sum: bool = False
    min_sum: int = 3
    peers: Mapping[str, str] | None = None

    def __post_init__(self):
        for name in ("models", "algorithms", "disclose"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, tuple) and all(isinstance(text, str) for text in value)):
                raise OptionError(f"policy: {name} is {value!r}; give a list of texts.")
        for text in self.models or ():
            if len(text) < HASH:
                raise OptionError(f"policy: models holds {text!r}; give at least {HASH} characters of the hash.")
        odd = sorted(set(self.disclose) - set(TOLD))
        if odd:
            raise OptionError(f"policy: disclose holds {odd[0]!r}; choose among {', '.join(TOLD)}.")
        odd = [name for name in self.algorithms or () if name not in ALGORITHMS and ":" not in name]
        if odd:
            known = ", ".join(ALGORITHMS)
            raise OptionError(
                f"policy: algorithms holds {odd[0]!r}; choose among {known}, or give module:object of a model's "
                "package."
            )
        numbers = {"max_rounds": 0, "min_units": 0, "min_rows": 0, "min_silos": 1, "min_sum": 2, "max_shared_by": 1}
        for name, least in numbers.items():
            value: Any = getattr(self, name)
            if value is None and name == "max_rounds":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(
                    f"policy: {name} is {value!r}; give a whole number of at least {least}{WHY.get(name, '')}."
                )
        if not isinstance(self.secure_sum, bool):
            raise OptionError(f"policy: secure_sum is {self.secure_sum!r}; give true or false.")
        keys = list(self.peers.values()) if isinstance(self.peers, Mapping) else [self.peers]
        if self.peers is not None and not all(isinstance(key, str) and WHOLE_KEY.fullmatch(key) for key in keys):
            raise OptionError(
                "policy: peers must give the whole key of each silo by its name: 64 characters, 0 to 9 and a to f."
            )
        if len(set(map(str, keys))) < len(keys):
            raise OptionError("policy: peers gives two silos the same key; ask them for theirs once more.")
        for name, most in (("epsilon", sys.float_info.max), ("delta", MOST_DELTA)):
            value = getattr(self, name)
            if value is None and name == "epsilon":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
                limit = f" of at most {MOST_DELTA:g}" if name == "delta" else ""
                raise OptionError(f"policy: {name} is {value!r}; give a positive number{limit}.")

    @property
    def remarks(self) -> list[str]:
        """What is allowed here and may not be meant."""
        if self.min_sum > 2:
            return []
        return [
            "policy: min_sum is 2: of a sum of two silos each can subtract itself, so that replies are hidden from the "
            "server alone; give 3 or more, unless the other silo may read this one's replies."
        ]

    @classmethod
    def read(cls, path: str | os.PathLike) -> "Policy":
        """Read a TOML file; whatever is not understood is an error."""
        try:
            found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise OptionError(f"The policy {str(path)!r} cannot be read: {error}.") from error
        known = [field.name for field in dataclasses.fields(cls)]
        odd = sorted(set(found) - set(known))
        if odd:
            raise OptionError(f"The policy {str(path)!r} has {odd[0]!r}; known are {', '.join(known)}.")
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in found.items()}
        return cls(**values)
