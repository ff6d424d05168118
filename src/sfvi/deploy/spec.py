"""What a run is: plain values, which the server's operator chooses and every silo checks."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..algorithms import AlgorithmOptions, FastStart, FixedNoise, SiloPrivacy, UnitPrivacy
from ..algorithms.options import check_whole
from ..bounds import Bound, elbo, importance_weighted, locally_enhanced
from ..errors import OptionError, first_line
from ..privacy.policy import ALGORITHMS
from .code import Code
from .wire import Wire

NESTED = {"fast_start": FastStart, "fixed_noise": FixedNoise}
PRIVACY = {"unit": UnitPrivacy, "silo": SiloPrivacy}
BOUNDS = {"elbo": elbo, "locally_enhanced": locally_enhanced, "importance_weighted": importance_weighted}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
SILO = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}")  # it becomes a certificate's name
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:.]{2,45}")
MOST_DAYS = 3650
TAKEN = ("audit.jsonl", "compiled", "masks", "secret")  # beside the folders of runs at a silo


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run.

    Args:
        name: Of the run: letters, digits, "_", "." and "-". The same name continues what was begun under it.
        silos: Names of all silos.
        algorithm: "SFVI", "SFVIAvg" or "Sites"; or "module:object" for an options object in the package of the model.
        options: Of the algorithm, as far as they are numbers or text; `bound` as ["locally_enhanced", 10].
        key: Of all randomness.
        num_rounds: Rounds; by default what mostly suffices for the algorithm.
        until_converged: Stop earlier when the result no longer moves; needs `disclose_elbo`.
        min_silos: Go on without the others once so many have answered; by default all are needed.
        late: With `min_silos`, seconds to wait for the others.
        deadline: Seconds to wait for silos that are needed before the run stops, to be continued later.
        disclose_elbo: Let every silo add its estimate of its part of the ELBO to its replies.
        wire: Precision of numbers on the wire.
        secure_sum: Let nobody see a silo's replies, but the sum of all silos'.
    """

    name: str
    silos: tuple[str, ...]
    algorithm: str = "SFVI"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    key: int = 0
    num_rounds: int | None = None
    until_converged: bool = False
    min_silos: int | None = None
    late: float = 10.0
    deadline: float = 600.0
    disclose_elbo: bool = False
    wire: Wire = dataclasses.field(default_factory=Wire)
    secure_sum: bool = False

    def __post_init__(self):
        check_name("name", self.name)
        if self.name.lower() in TAKEN:
            raise OptionError(f"name is {self.name!r}, which silos have files of; choose another.")
        if not isinstance(self.silos, tuple) or not self.silos or list(self.silos) != sorted(set(self.silos)):
            raise OptionError(f"silos is {self.silos!r}; give the sorted names of the silos, each once.")
        for silo in self.silos:
            check_name("a silo's name", silo)
        if not isinstance(self.algorithm, str):
            raise OptionError(f"algorithm is {self.algorithm!r}; give a name.")
        if isinstance(self.key, bool) or not isinstance(self.key, int) or abs(self.key) >= 2**63:
            raise OptionError(f"key is {self.key!r}; give a whole number.")
        if self.num_rounds is not None:
            check_whole("num_rounds", self.num_rounds, at_least=1)
        for name in ("until_converged", "disclose_elbo", "secure_sum"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is {getattr(self, name)!r}; give True or False.")
        for name in ("late", "deadline"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise OptionError(f"{name} is {value!r}; give seconds.")
        if self.min_silos is not None:
            check_whole("min_silos", self.min_silos, at_least=1)
            if self.min_silos > len(self.silos):
                raise OptionError(f"min_silos is {self.min_silos}, but there are {len(self.silos)} silos.")
        if self.secure_sum and (self.wire.top_k is not None or self.wire.reply == "bfloat16"):
            raise OptionError("secure_sum sends whole numbers in fixed point; leave top_k and bfloat16 out.")
        if ":" not in self.algorithm:
            choose(self.algorithm, self.options)  # whatever is wrong with it is said now
        if self.until_converged and not self.disclose_elbo:
            raise OptionError("until_converged needs the ELBO, which silos keep to themselves; set disclose_elbo too.")

    def chosen(self, code: Code) -> AlgorithmOptions:
        """The algorithm's options, made here from plain values or found in the model's own package."""
        return choose(self.algorithm, self.options, code.neighbour)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        plain = dataclasses.asdict(self)
        return {**plain, "silos": list(self.silos)}

    @classmethod
    def from_json(cls, plain: Any) -> "RunSpec":
        """From plain values, every one checked."""
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(plain, dict) or not set(plain) <= fields or not isinstance(plain.get("silos"), list):
            odd = sorted(set(plain) - fields) if isinstance(plain, dict) else plain
            raise OptionError(f"A run must be described by {', '.join(sorted(fields))}; check {odd!r}.")
        wire = plain.get("wire", {})
        if not isinstance(wire, dict) or not set(wire) <= {field.name for field in dataclasses.fields(Wire)}:
            raise OptionError(f"wire is {wire!r}; give broadcast, reply and top_k.")
        if not all(isinstance(name, str) for name in plain["silos"]):
            raise OptionError("silos must be text.")
        if not isinstance(plain.get("options", {}), dict):
            raise OptionError(f"options is {plain['options']!r}; give a mapping.")
        return cls(**{**plain, "silos": tuple(plain["silos"]), "wire": Wire(**wire)})

    def identity(self) -> dict[str, Any]:
        """By what the run is known again; how long one waits may change."""
        plain = {name: value for name, value in self.to_json().items() if name not in ("deadline", "late")}
        return json.loads(json.dumps(plain))

    def digest(self) -> str:
        """The same in short."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


def choose(algorithm: str, options: Mapping[str, Any], find: Callable[[str], Any] | None = None) -> AlgorithmOptions:
    """An algorithm's options from plain values, or those that a module holds.

    Args:
        algorithm: "SFVI", "SFVIAvg" or "Sites"; or "module:object".
        options: Of the algorithm, as far as they are numbers or text.
        find: Gets what "module:object" names.
    """
    if ":" in algorithm and find is not None:
        if options:
            raise OptionError(f"options have no use beside algorithm {algorithm!r}; set them there.")
        found = find(algorithm)
        if isinstance(found, type) or not isinstance(found, AlgorithmOptions):
            raise OptionError(
                f"algorithm: {algorithm!r} is a {type(found).__name__}; name an object like sfvi.Sites(...)."
            )
        return found
    if algorithm not in ALGORITHMS:
        raise OptionError(
            f"algorithm is {algorithm!r}; choose {', '.join(ALGORITHMS)}, or module:object of the model's package."
        )
    return _build(ALGORITHMS[algorithm], options)


def _build(kind, options):
    given = dict(options)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in NOT_PLAIN}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise OptionError(
            f"{kind.__name__} has no option {unknown[0]!r} that can be given as a plain value; there are "
            f"{', '.join(sorted(fields))}. Others need an object in the model's package (algorithm module:object)."
        )
    for name, nested in NESTED.items():
        if isinstance(given.get(name), dict):
            given[name] = _build(nested, given[name])
    if "privacy" in given:
        given["privacy"] = _privacy(given["privacy"])
    if "bound" in given and not isinstance(given["bound"], Bound):
        given["bound"] = _bound(given["bound"])
    try:
        return kind(**given)
    except TypeError as error:
        raise OptionError(f"{kind.__name__}: {first_line(error)}.") from None


NOT_PLAIN = ("optimizer", "local_optimizer", "global_family", "local_family", "init_loc_fn", "participation")


def _bound(given):
    name, *numbers = given if isinstance(given, list | tuple) and given else [given]
    if not isinstance(name, str) or name not in BOUNDS or (name == "elbo" and numbers) or len(numbers) > 1:
        raise OptionError(f"bound is {given!r}; give one of {', '.join(BOUNDS)}, with a number of draws if it has any.")
    return BOUNDS[name](*numbers)


def _privacy(given):
    """Like {"protects": "unit", "epsilon": 1.0, "clip": 1.0}."""
    if given is None or not isinstance(given, dict):
        return given
    protects = given.get("protects")
    if protects not in PRIVACY:
        raise OptionError(f"privacy protects {protects!r}; choose 'unit' or 'silo'.")
    return _build(PRIVACY[protects], {name: value for name, value in given.items() if name != "protects"})


def check_name(what: str, name: Any) -> None:
    """Names become folders and certificates."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise OptionError(
            f"{what} is {name!r}; use letters, digits, '_', '.' and '-', beginning with one of the first."
        )


def check_kits(silos: list[str], host: str, port: int, valid_days: int, *, taken: tuple[str, ...]) -> None:
    """What is asked of the silos for which kits are made, of the server's address, and of certificates."""
    for name in silos:
        if not SILO.fullmatch(name):
            raise OptionError(
                f"a silo's name is {name!r}; use letters, digits, '_' and '-', at most 60, beginning with one of the "
                "first."
            )
        if name in taken:
            raise OptionError(f"A silo cannot be named {name!r}; choose another name.")
    if not silos or len(set(silos)) < len(silos):
        raise OptionError(f"silos are {silos!r}; give each name once.")
    if not 0 < port < 65536:
        raise OptionError(f"port is {port!r}; give a number between 1 and 65535.")
    if not HOST.fullmatch(host):
        raise OptionError(f"host is {host!r}; give the server's name or address, like fl.example.org or 10.0.0.7.")
    if not 0 < valid_days <= MOST_DAYS:
        raise OptionError(f"valid_days is {valid_days!r}; give at most {MOST_DAYS}, ten years.")
