import json
import random
import struct

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from sfvi.deploy import codec
from sfvi.deploy.codec import DTYPES, PREFIX, Message, decode, encode, flatten, unflatten
from sfvi.errors import WireError

LIMIT = 1 << 22
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
halves = hnp.arrays(np.uint16, shapes).map(lambda array: array.view(DTYPES["bfloat16"]))
others = st.sampled_from([kind for name, kind in DTYPES.items() if name != "bfloat16"])
arrays = halves | others.flatmap(lambda kind: hnp.arrays(kind, shapes))
messages = st.builds(
    Message,
    kind=st.text(),
    run=st.text(),
    model=st.text(),
    step=st.integers(-1, 2**40),
    fields=st.dictionaries(st.text(), scalars, max_size=4),
    arrays=st.dictionaries(st.text(), arrays, max_size=4),
)


def same(one, other):
    return (
        one[:5] == other[:5]
        and list(one.arrays) == list(other.arrays)
        and all(
            a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
            for a, b in zip(one.arrays.values(), other.arrays.values(), strict=True)
        )
    )


@given(messages)
def test_what_is_written_is_read(message):
    assert same(decode(encode(message), limit=LIMIT), message)


def example():
    rng = np.random.default_rng(0)
    values = {
        "broadcast.shared.family.loc": rng.normal(size=5).astype(np.float32),
        "broadcast.shared.family.lower": rng.normal(size=(3, 3)),
        "broadcast.round": np.int32(7),
        "broadcast.first": np.array(True),
        "broadcast.key": np.array([1, 2], np.uint32),
        "small": rng.normal(size=4).astype(DTYPES["bfloat16"]),
    }
    fields = {"attempt": 3, "leg": 0, "base": 6, "durable": 4, "mark": True}
    return Message("round", "asthma", "ab12", 7, fields, {name: np.asarray(array) for name, array in values.items()})


def mutate(data, rng):
    """One to three changes of bytes, lengths or order."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        what, at = rng.randrange(6), rng.randrange(len(data)) if data else 0
        if what == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1 and data:
            data[at] = rng.randrange(256)
        elif what == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        elif what == 3:
            del data[at : at + rng.randint(1, 9)]
        elif what == 4:
            data = data[: rng.randrange(len(data) + 1)]
        else:
            other = rng.randrange(len(data)) if data else 0
            data[at : at + 4], data[other : other + 4] = data[other : other + 4], data[at : at + 4]
    return bytes(data)


def sealed(body):
    return body + codec._digest(body)


def test_ten_thousand_damaged_messages_are_refused():
    """Nothing but WireError, and nothing is accepted that is not the message itself."""
    rng, original = random.Random(1), encode(example())
    refused = 0
    for _ in range(10_000):
        damaged = mutate(original, rng)
        try:
            found = decode(damaged, limit=LIMIT)
        except WireError:
            refused += 1
        else:
            assert damaged == original
            assert same(found, example())
    assert refused > 9_900


def test_ten_thousand_forged_messages_are_refused_or_well_formed():
    """With a digest that fits: what is accepted says what it says, and fits nothing that it does not."""
    rng, original = random.Random(2), encode(example())
    template = {"loc": jnp.zeros(5, jnp.float32)}
    accepted = 0
    for _ in range(10_000):
        forged = sealed(mutate(original[: -codec.DIGEST_SIZE], rng))
        try:
            found = decode(forged, limit=LIMIT)
        except WireError:
            continue
        accepted += 1
        assert same(decode(encode(found), limit=LIMIT), found)
        with pytest.raises(WireError):
            unflatten(template, found.arrays, prefix="broadcast", dtype="float32")
    assert accepted < 9_000


def test_limits():
    data = encode(example())
    with pytest.raises(WireError, match="at most 100 were expected"):
        decode(data, limit=100)
    with pytest.raises(WireError, match="must be bytes"):
        decode("text", limit=LIMIT)  # type: ignore[arg-type]
    with pytest.raises(WireError, match="protocol version 2, here it is 1"):
        decode(sealed(PREFIX.pack(b"SFVI", 2, 2) + b"{}"), limit=LIMIT)
    with pytest.raises(WireError, match="longer than itself"):
        decode(sealed(PREFIX.pack(b"SFVI", 1, 2**31) + b"{}"), limit=LIMIT)
    with pytest.raises(WireError, match="no message of sfvi"):
        decode(struct.pack("<4sHI", b"PK\3\4", 1, 2) + bytes(40), limit=LIMIT)


@pytest.mark.parametrize(
    "header",
    [
        "[" * 100_000,
        '{"kind": NaN}',
        '{"kind": "a", "kind": "b"}',
        json.dumps({"kind": "a", "run": "b", "model": "c", "step": True, "fields": {}, "arrays": []}),
        json.dumps({"kind": "a", "run": "b", "model": "c", "step": 1, "fields": [], "arrays": []}),
        json.dumps({"kind": "a", "run": "b", "model": "c", "step": 1, "fields": {}, "arrays": [["x", "object", [1]]]}),
        json.dumps(
            {"kind": "a", "run": "b", "model": "c", "step": 1, "fields": {}, "arrays": [["x", "bool", [2**39]]]}
        ),
        json.dumps({"kind": "a", "run": "b", "model": "c", "step": 1, "fields": {}, "arrays": [["x", "bool", [-1]]]}),
        json.dumps({"kind": "a", "run": "b", "model": "c", "step": 1, "fields": {}, "arrays": {"x": 1}}),
    ],
    ids=range(9),
)
def test_headers_that_are_none(header):
    body = PREFIX.pack(b"SFVI", 1, len(header)) + header.encode()
    with pytest.raises(WireError):
        decode(sealed(body), limit=LIMIT)


def tree():
    key = jax.random.key(3, impl="threefry2x32")
    return {"loc": jnp.arange(3.0), "n": jnp.asarray(3, jnp.int32), "size": jnp.asarray(0.1), "key": key}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_trees_there_and_back(dtype):
    """Single numbers keep their precision; keys and whole numbers stay what they are."""
    message = Message("round", "r", "m", 0, {}, flatten(tree(), prefix="b", dtype=dtype))
    found = unflatten(tree(), decode(encode(message), limit=LIMIT).arrays, prefix="b", dtype=dtype)
    assert float(found["size"]) == 0.1
    np.testing.assert_array_equal(found["loc"], tree()["loc"])
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(tree()["key"]).tolist()
    assert found["n"].dtype == jnp.int32


def test_trees_that_do_not_fit():
    arrays = flatten(tree(), prefix="b", dtype="float32")
    with pytest.raises(WireError, match="is missing"):
        unflatten(tree(), {k: v for k, v in arrays.items() if "loc" not in k}, prefix="b", dtype="float32")
    with pytest.raises(WireError, match="is unknown"):
        unflatten(tree(), {**arrays, "extra": np.zeros(1)}, prefix="b", dtype="float32")
    with pytest.raises(WireError, match=r"float32 of shape \(3,\), expected float64"):
        unflatten(tree(), arrays, prefix="b", dtype="float64")
    bad = {name: np.full_like(array, np.nan) if "loc" in name else array for name, array in arrays.items()}
    with pytest.raises(WireError, match="NaN or infinity in"):
        unflatten(tree(), bad, prefix="b", dtype="float32")
    with pytest.raises(WireError, match="too large for float32"):
        flatten({"x": jnp.asarray([1e300])}, prefix="b", dtype="float32")
