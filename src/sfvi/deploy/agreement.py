"""What server and silos tell each other before the first round, and with every step."""

import re
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._types import Theta
from ..bounds import Bound
from ..errors import WireError
from .code import Code
from .codec import Message
from .spec import RunSpec

JOIN_LIMIT = 1 << 26  # bytes of a message before sizes are agreed on


def offer(spec: RunSpec, code: Code, attempt: int) -> dict[str, Any]:
    """What the server says of a run to those who shall take part."""
    return {"spec": spec.to_json(), "attempt": attempt, **_surroundings(code)}


def check(fields: dict[str, Any], code: Code) -> RunSpec:
    """A silo's look at the offer: everything must be as it is here."""
    mine = _surroundings(code)
    names = {
        "sfvi": "version of sfvi",
        "precision": "precision (start both with the same --precision)",
        "population": "population program, or version of jax or numpyro",
    }
    for item, what in names.items():
        if fields.get(item) != mine[item]:
            raise WireError(f"the server has another {what}: {fields.get(item)!r} there, {mine[item]!r} here")
    attempt = fields.get("attempt")
    if isinstance(attempt, bool) or not isinstance(attempt, int) or attempt < 0:
        raise WireError("an offer is malformed: it must have a number of attempts")
    return RunSpec.from_json(fields.get("spec"))


def _surroundings(code):
    return {
        "sfvi": version("sfvi"),
        "precision": str(jnp.result_type(float)),
        "population": code.model.population.fingerprint(),
    }


def theta_arrays(theta: Theta) -> tuple[list[list[str]], dict[str, np.ndarray]]:
    r"""$\theta$ as arrays, and the names on the way to each."""
    leaves = jax.tree.flatten_with_path(theta)[0]
    paths = [[str(getattr(entry, "key", entry)) for entry in path] for path, _ in leaves]
    return paths, {f"theta.{position}": np.asarray(leaf) for position, (_, leaf) in enumerate(leaves)}


def theta_tree(paths: Any, arrays: dict[str, np.ndarray]) -> Theta:
    r"""Undo `theta_arrays`."""
    fine = isinstance(paths, list) and all(
        isinstance(path, list) and path and all(isinstance(entry, str) for entry in path) for path in paths
    )
    if not fine or {f"theta.{position}" for position in range(len(paths))} != set(arrays):
        raise WireError("a message is malformed: theta and its names do not fit")
    theta: dict = {}
    for position, path in enumerate(paths):
        branch = theta
        for entry in path[:-1]:
            branch = branch.setdefault(entry, {})
            if not isinstance(branch, dict):
                raise WireError("a message is malformed: theta has an array where it has a branch")
        array = arrays[f"theta.{position}"]
        if path[-1] in branch or not np.isfinite(array.astype(np.float64)).all():
            raise WireError(f"a message is malformed: theta's {path[-1]!r} stands twice or is not finite")
        branch[path[-1]] = jnp.asarray(array)
    return theta


def joint_theta(known: Theta, answer: Message, shared: Theta) -> Theta:
    r"""$\theta$ in the model's own space as all silos tell it: of parameters that are shared, and all the same."""
    found = theta_tree(answer.fields.get("theta"), answer.arrays)
    for name, value in found.items():
        if name not in shared:
            raise WireError(f"it tells of a parameter {name!r} that is not in theta")
        leaves, others = jax.tree.leaves(value), jax.tree.leaves(known.get(name, value))
        same = len(leaves) == len(others) and all(
            np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-4, atol=1e-6)
            for a, b in zip(leaves, others, strict=False)
        )
        if not same:
            raise WireError(f"its {name!r} is not that of the other silos")
    return found | known


def settled(message: Message) -> tuple[Bound, Theta]:
    """What the server settled with all silos."""
    bound: Any = message.fields.get("bound")
    plain = isinstance(bound, list) and len(bound) == 3 and isinstance(bound[0], int) and bound[0] >= 1
    if not plain or not isinstance(bound[1], int | None) or bound[2] not in ("units", "everything"):
        raise WireError("a message is malformed: it must say which bound is maximized")
    return Bound(*bound), theta_tree(message.fields.get("theta"), message.arrays)


class Joined(NamedTuple):
    r"""What a silo says of itself before the first round.

    Attributes:
        num_units: How many exchangeable units it has; 0 if that means nothing there.
        groups: Whether it has units with latents of their own.
        tangled: Whether those depend on each other.
        network: What its inference network computes, see `network_identity`.
        theta: The initial values of the parameters in its program.
        key: Its public key for secure sums; None without them.
    """

    num_units: float
    groups: bool
    tangled: bool
    network: dict[str, Any] | None
    theta: Theta
    key: str | None = None

    def write(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """As fields and arrays of a message."""
        paths, arrays = theta_arrays(self.theta)
        return {**self._asdict(), "theta": paths}, arrays

    @classmethod
    def read(cls, message: Message) -> "Joined":
        """From a message, checked."""
        fields = message.fields
        units, network = fields.get("num_units"), fields.get("network")
        if not isinstance(units, int | float) or isinstance(units, bool) or not 0 <= units < float("inf"):
            raise WireError("its number of units is none")
        flags = [fields.get(name) for name in ("groups", "tangled")]
        if not all(isinstance(flag, bool) for flag in flags) or not isinstance(network, dict | None):
            raise WireError("what it says of its program is malformed")
        key = fields.get("key")
        if key is not None and not (isinstance(key, str) and re.fullmatch("[0-9a-f]{64}", key)):
            raise WireError("its key is malformed")
        theta = theta_tree(fields.get("theta"), message.arrays)
        return cls(float(units), *flags, network, theta, key)  # type: ignore[arg-type]


def keys_of(message: Message, silos: tuple[str, ...]) -> dict[str, str]:
    """The public keys of all silos that the server gives; none in runs without secure sums."""
    keys: Any = message.fields.get("keys")
    if not isinstance(keys, dict) or (keys and set(keys) != set(silos)):
        raise WireError("a message is malformed: it must give the key of every silo")
    whole = all(isinstance(key, str) and re.fullmatch("[0-9a-f]{64}", key) for key in keys.values())
    if not whole or len(set(keys.values())) < len(keys):
        raise WireError("a message is malformed: keys are none, or two silos have the same")
    return keys


def versions(message: Message) -> list[int]:
    """The steps of which a silo has the state, from its answer to `begin`."""
    found = message.fields.get("versions")
    if not isinstance(found, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in found):
        raise WireError("the states it has are malformed")
    return found


def elbo_term(message: Message, *, disclosed: bool) -> float:
    """A silo's part of the ELBO, if it was asked for; else NaN."""
    found = message.fields.get("elbo")
    if set(message.fields) != ({"elbo"} if disclosed else set()) or not isinstance(found, float | None):
        raise WireError("its reply holds something else than it should")
    return float("nan") if found is None else found


class Order(NamedTuple):
    """What a step is about.

    Attributes:
        attempt: How often the server has begun; a new one may go back.
        leg: Which algorithm of the run.
        base: The silo's step from whose state to go on; -1 for none.
        durable: The silo's step that belongs to what the server has on disk.
        mark: Whether the new state must be on disk before the answer.
        among: Who takes part in the step, for secure sums.
    """

    attempt: int
    leg: int
    base: int
    durable: int
    mark: bool
    among: tuple[str, ...] = ()

    @classmethod
    def read(cls, message: Message) -> "Order":
        """From a message, checked."""
        values: list[Any] = [message.fields.get(name) for name in cls._fields]
        *numbers, mark, among = values
        if set(message.fields) != set(cls._fields) or not isinstance(mark, bool):
            raise WireError("a step is malformed: it has other entries than it should")
        if not isinstance(among, list) or not all(isinstance(n, str) for n in among):
            raise WireError("a step is malformed: it must say who takes part")
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= -1 for n in numbers):
            raise WireError("a step is malformed: its numbers are none")
        return cls(*values)._replace(among=tuple(among))
