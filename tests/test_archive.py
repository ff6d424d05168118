"""Files are whole or absent, and hold what was put in."""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import sfvi
from sfvi import archive

ARRAYS = st.dictionaries(
    st.text(st.characters(codec="ascii", exclude_characters="/\\\0"), min_size=1, max_size=10).filter(
        lambda name: name != archive.HEADER and name == name.strip() and name not in (".", "..", "file")
    ),
    hnp.arrays(st.sampled_from([np.float32, np.float64, np.int32, np.uint32, np.bool_]), hnp.array_shapes(min_dims=0)),
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ARRAYS, st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=3))
def test_round_trip(tmp_path, arrays, extra):
    archive.write(tmp_path / "file.npz", arrays, {"kind": "test", "extra": extra})
    found, header = archive.read(tmp_path / "file.npz", kind="test")
    assert header["extra"] == extra
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_never_passes_silently(tmp_path, data):
    """Flip any byte: either a clear refusal, or the contents are untouched."""
    path = tmp_path / "file.npz"
    payload = {"a": np.arange(20.0), "b": np.ones((2, 3), np.float32)}
    archive.write(path, payload, {"kind": "test"})
    raw = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    try:
        arrays, _ = archive.read(path, kind="test")
    except sfvi.ArchiveError:
        return
    assert arrays.keys() == payload.keys()
    assert all(np.array_equal(arrays[name], payload[name]) for name in payload)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.npz"
    archive.write(path, {"a": np.ones(3)}, {"kind": "test"})

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        archive.write(path, {"a": np.zeros(3)}, {"kind": "test"})
    monkeypatch.undo()
    np.testing.assert_array_equal(archive.read(path, kind="test")[0]["a"], np.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["file.npz"]


def test_pickles_are_not_read(tmp_path):
    np.savez(tmp_path / "evil.npz", a=np.array([{"code": 1}], dtype=object))
    with pytest.raises(sfvi.ArchiveError, match="damaged, or not a file that sfvi wrote"):
        archive.read(tmp_path / "evil.npz", kind="test")


def test_a_tree_must_fit_exactly():
    tree = {"a": jnp.ones(3), "b": [jnp.zeros((), jnp.int32)]}
    arrays = {name: np.asarray(leaf) for name, leaf in archive.flatten(tree, prefix="t").items()}
    same = archive.unflatten(tree, arrays, prefix="t", path="f")
    assert same["b"][0].dtype == jnp.int32
    for broken in (arrays | {"t['c']": np.ones(1)}, {"t['a']": arrays["t['a']"]}, arrays | {"t['a']": np.ones(4)}):
        with pytest.raises(sfvi.ArchiveError, match="does not fit"):
            archive.unflatten(tree, broken, prefix="t", path="f")
