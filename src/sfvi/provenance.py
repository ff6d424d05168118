"""How a fit came about: algorithm, options, key, precision, versions, and what a silo's replies were made of."""

import dataclasses
import functools
import inspect
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._random import as_key
from .algorithms import Spent, participation
from .bounds import Bound
from .families import Amortized

PACKAGES = ("sfvi", "jax", "numpyro", "optax", "equinox", "numpy")
PLAIN = bool | int | float | str | None


class Part(NamedTuple):
    """Numbers in a silo's reply: the names on the way to them, their shape and precision."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


class Sent(NamedTuple):
    """What one reply of a silo holds under one algorithm of the run: all of it."""

    algorithm: str
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, algorithm: Any, silent: Any) -> "Sent":
        """Read off the reply of a silo that has nothing to say, numbers or shapes.

        Args:
            algorithm: The functions of the protocol.
            silent: What its `silent` returns.
        """
        leaves = jax.tree.flatten_with_path(silent)[0]
        parts = (Part(tuple(map(_entry, path)), tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves)
        return cls(type(algorithm).__name__.removeprefix("Bound"), tuple(parts))


class Provenance(NamedTuple):
    """How a fit came about.

    Attributes:
        engine: "in process" or "deployed".
        algorithm: Name of its options' class, like "SFVI".
        options: All of them, as text.
        given: Names of those that are not the default.
        settings: Of the run, as text: rounds, stopping rule and the like.
        key: Of all randomness: the number that was given, or the words of the key.
        precision: "float32" or "float64".
        versions: Of Python and of what the result depends on.
        sent: What a reply holds, for each algorithm of the run.
        privacy: What the run has cost those whom it protects; None without differential privacy.
    """

    engine: str
    algorithm: str
    options: dict[str, str]
    given: tuple[str, ...]
    settings: dict[str, str]
    key: str
    precision: str
    versions: dict[str, str]
    sent: tuple[Sent, ...] = ()
    privacy: Spent | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        sent = [[s.algorithm, [list(part) for part in s.parts]] for s in self.sent]
        return {**self._asdict(), "sent": sent, "privacy": None if self.privacy is None else self.privacy._asdict()}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any] | None) -> "Provenance | None":
        """From plain values; None for files that do not have it."""
        if plain is None:
            return None
        sent = tuple(
            Sent(name, tuple(Part(tuple(path), tuple(shape), dtype) for path, shape, dtype in parts))
            for name, parts in plain["sent"]
        )
        privacy = None if plain.get("privacy") is None else Spent(**plain["privacy"])
        return cls(**{**plain, "given": tuple(plain["given"]), "sent": sent, "privacy": privacy})


def provenance(engine: str, options: Any, key: Any, settings: Mapping[str, Any]) -> Provenance:
    """Take down how a run is made, before it runs.

    Args:
        engine: What carries the messages.
        options: The algorithm's, as the user gave them.
        key: As the user gave it.
        settings: Of the run; those that are None are left out.
    """
    fields = dataclasses.fields(options) if dataclasses.is_dataclass(options) else ()
    texts = {field.name: _text(getattr(options, field.name)) for field in fields}
    given = tuple(name for name, text in texts.items() if text != _default(options, name))
    said = {name: value for name, value in settings.items() if value is not None}
    run = {name: value if isinstance(value, str) else _text(value) for name, value in said.items()}
    return Provenance(
        engine, type(options).__name__, texts, given, run, _key_text(key), str(jnp.result_type(float)), versions()
    )


def versions() -> dict[str, str]:
    """Of Python and the packages that a result depends on, here and now."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def replies(parts: Iterable[tuple[Any, Any]]) -> tuple[Sent, ...]:
    """What replies hold under each algorithm, given with its silent reply; one that runs again is told once."""
    return tuple(dict.fromkeys(Sent.of(algorithm, silent) for algorithm, silent in parts))


def spent(options: Any, rounds: int, left: float | None) -> Spent | None:
    """What so many rounds under these options have cost those whom they protect, and what they leave of the noise."""
    return None if options.privacy is None else Spent.of(options.privacy, rounds, left)


def _entry(entry):
    """One step of the way to a leaf of a tree: a field's name, a key or a position."""
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _key_text(key):
    if isinstance(key, int | np.integer):
        return str(int(key))
    return " ".join(str(int(word)) for word in np.asarray(jax.random.key_data(as_key(key))))


def _default(options, name):
    field = next(field for field in dataclasses.fields(options) if field.name == name)
    if field.default is not dataclasses.MISSING:
        return _text(field.default)
    return _text(field.default_factory()) if field.default_factory is not dataclasses.MISSING else None


def _text(value) -> str:
    """A value as its user would write it, as far as that can be told; no addresses."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Bound):
        name = "importance_weighted" if value.over == "everything" else "locally_enhanced"
        return "elbo()" if value.num_draws == 1 else f"{name}({value.num_draws})"
    if isinstance(value, participation.ByRule):
        return f"rule({_text(value.function)})"
    if isinstance(value, participation.Sampled):
        return f"fraction({value.share})" if value.count is None else f"count({value.count})"
    if isinstance(value, participation.Everyone):
        return "everyone()"
    if isinstance(value, optax.GradientTransformation):
        return "an optax optimizer of the caller's, which does not say what it is"
    if isinstance(value, Amortized):
        return f"amortized({type(value.network).__name__}, follow_globals={value.follow_globals})"
    if dataclasses.is_dataclass(value):
        inside = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _call(type(value).__name__, inside)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _call(type(value).__name__, value._asdict())  # type: ignore[attr-defined]
    if isinstance(value, functools.partial):
        return f"{_text(value.func)} with {value.args} {value.keywords}" if value.args else _text(value.func)
    if inspect.isfunction(value):
        made_by = value.__qualname__.split(".<locals>")
        settings = inspect.getclosurevars(value).nonlocals if len(made_by) > 1 else {}
        plain = {n: v for n, v in settings.items() if isinstance(v, PLAIN) or dataclasses.is_dataclass(v)}
        return _call(made_by[0], plain) if len(made_by) > 1 else value.__name__
    return type(value).__name__


def _call(name, arguments):
    return f"{name}({', '.join(f'{key}={_text(value)}' for key, value in arguments.items())})"
