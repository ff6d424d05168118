r"""The bytes of every message: named, typed arrays and a JSON header; no pickle, no code.

    "SFVI" | version | length of header | header (JSON) | arrays, one after the other, little endian | digest

The header says what the message is, of which run, model and step, and lists name, type and shape of each array. The
digest (BLAKE2b, 16 bytes, of all that stands before it) finds damage; who sent the message is the transport's concern
(mutual TLS). `decode` accepts what `encode` wrote and raises `WireError` for everything else.
"""

import hashlib
import json
import math
import struct
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .._random import IMPLEMENTATION
from ..errors import WireError

PROTOCOL = 1
MAGIC = b"SFVI"
PREFIX = struct.Struct("<4sHI")
DIGEST_SIZE = 16
MAX_HEADER = 1 << 20
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{name: np.dtype(name) for name in ("float32", "float64", "int32", "int64", "uint32", "bool")},
}
KEYS = {"kind", "run", "model", "step", "fields", "arrays"}
Tree = TypeVar("Tree")


class Message(NamedTuple):
    """What one side tells the other.

    Attributes:
        kind: What it is: "join", "round", "reply", ...
        run: Name of the run.
        model: Hash of the model's code.
        step: Number of the step that it belongs to; -1 before the first.
        fields: Whatever else has to be said, as JSON.
        arrays: Numbers, by name.
    """

    kind: str
    run: str
    model: str
    step: int
    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]


def encode(message: Message) -> bytes:
    """Write a message."""
    table = [[name, array.dtype.name, list(array.shape)] for name, array in message.arrays.items()]
    for name, dtype, _ in table:
        if dtype not in DTYPES:
            raise WireError(f"{name!r} is of type {dtype}, which no message may hold.")
    header = json.dumps({**message._asdict(), "arrays": table}, allow_nan=False, separators=(",", ":")).encode()
    parts = [PREFIX.pack(MAGIC, PROTOCOL, len(header)), header]
    parts += [np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")) for array in message.arrays.values()]
    body = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)
    return body + _digest(body)


def decode(data: bytes, *, limit: int) -> Message:
    """Read a message of at most `limit` bytes."""
    if not isinstance(data, bytes):
        raise WireError(f"A message must be bytes, not {type(data).__name__}.")
    if len(data) > limit:
        raise WireError(f"A message has {len(data):,} bytes; at most {limit:,} were expected.")
    if len(data) < PREFIX.size + DIGEST_SIZE or data[:4] != MAGIC:
        raise WireError("This is no message of sfvi.")
    _, version, size = PREFIX.unpack_from(data)
    if version != PROTOCOL:
        raise WireError(f"The message has protocol version {version}, here it is {PROTOCOL}; install the same sfvi.")
    body = data[:-DIGEST_SIZE]
    if _digest(body) != data[-DIGEST_SIZE:]:
        raise WireError("A message was damaged on its way: its digest does not fit.")
    if size > min(MAX_HEADER, len(body) - PREFIX.size):
        raise WireError("A message is malformed: its header is longer than itself.")
    header = _parse(body[PREFIX.size : PREFIX.size + size])
    arrays = _arrays(header.pop("arrays"), body[PREFIX.size + size :])
    return Message(**header, arrays=arrays)


def _digest(body):
    return hashlib.blake2b(body, digest_size=DIGEST_SIZE).digest()


def _parse(text):
    try:
        header = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        raise WireError("A message is malformed: its header is no JSON.") from None
    texts = ("kind", "run", "model")
    if not isinstance(header, dict) or set(header) != KEYS:
        raise WireError(f"A message is malformed: its header must have {sorted(KEYS)}.")
    step, fields = header["step"], header["fields"]
    whole = isinstance(step, int) and not isinstance(step, bool) and -1 <= step < 2**62
    if not (all(isinstance(header[name], str) for name in texts) and whole and isinstance(fields, dict)):
        raise WireError("A message is malformed: an entry of its header has the wrong type.")
    return header


def _unique(pairs):
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key stands twice")
    return entries


def _no_constant(name):
    raise ValueError(f"{name} is no JSON")


def _finite(text):
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large")
    return number


def _arrays(table, payload):
    arrays, start = {}, 0
    entries: list[Any] = table if isinstance(table, list) else [None]
    for entry in entries:
        if not _is_entry(entry) or entry[0] in arrays:
            raise WireError("A message is malformed: its list of arrays has a bad entry.")
        name, dtype, shape = entry
        end = start + math.prod(shape) * DTYPES[dtype].itemsize
        if end > len(payload):
            raise WireError(f"A message is malformed: the array {name!r} is cut off.")
        raw = np.frombuffer(payload[start:end], DTYPES[dtype].newbyteorder("<"))
        if dtype == "bool" and not np.isin(raw.view(np.uint8), (0, 1)).all():
            raise WireError(f"A message is malformed: {name!r} holds booleans that are none.")
        arrays[name] = raw.reshape(shape).astype(DTYPES[dtype])
        start = end
    if start != len(payload):
        raise WireError("A message is malformed: there are bytes after its last array.")
    return arrays


def _is_entry(entry):
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    name, dtype, shape = entry
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(shape, list):
        return False
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**40 for n in shape)
    return whole and len(shape) <= 32 and math.prod(n for n in shape if n) < 2**40


def flatten(tree: Any, *, prefix: str, dtype: str) -> dict[str, np.ndarray]:
    """Name every leaf of a tree by its path.

    Arrays of floating point numbers become `dtype`; single numbers keep their precision, keys become words.
    """
    arrays = {}
    for path, leaf in jax.tree.flatten_with_path(tree)[0]:
        name = prefix + jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        if array.ndim and _is_float(array.dtype):
            with np.errstate(over="ignore"):  # said below, in a sentence
                array = array.astype(DTYPES[dtype])
        if _is_float(array.dtype) and not np.isfinite(array.astype(np.float64)).all():
            raise WireError(f"{name!r} holds NaN or infinity, or numbers too large for {array.dtype.name}.")
        arrays[name] = array
    return arrays


def unflatten(like: Tree, arrays: dict[str, np.ndarray], *, prefix: str, dtype: str) -> Tree:
    """Fill a tree of known structure: with all arrays of a message, and exactly those."""
    expected = {prefix + jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.flatten_with_path(like)[0]}
    odd = sorted(set(expected) ^ set(arrays))
    if odd:
        raise WireError(f"A message does not fit: {odd[0]!r} is {'missing' if odd[0] in expected else 'unknown'}.")
    leaves = [_checked(name, arrays[name], leaf, dtype) for name, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _checked(name, array, leaf, dtype):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    shape = (*leaf.shape, 2) if is_key else leaf.shape
    kind = np.dtype(np.uint32) if is_key else np.dtype(leaf.dtype)
    if len(shape) and _is_float(kind):
        kind = DTYPES[dtype]
    if array.shape != shape or array.dtype != kind:
        raise WireError(
            f"A message does not fit: {name!r} is {array.dtype.name} of shape {array.shape}, expected {kind.name} of "
            f"shape {shape}."
        )
    if _is_float(array.dtype) and not np.isfinite(array.astype(np.float64)).all():
        raise WireError(f"A message holds NaN or infinity in {name!r}.")
    if is_key:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=IMPLEMENTATION)
    return jnp.asarray(array.astype(leaf.dtype))


def _is_float(dtype):
    return jnp.issubdtype(dtype, jnp.floating)


def size_limit(*trees: Any) -> int:
    """More bytes than a message with these trees can have."""
    leaves = [leaf for tree in trees for leaf in jax.tree.leaves(tree)]
    return MAX_HEADER + sum(8 * max(1, math.prod(leaf.shape)) + 8 for leaf in leaves)
