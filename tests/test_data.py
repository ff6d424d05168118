"""Data that ships with the package, and splits."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sfvi


def test_six_cities_has_its_published_margins():
    data = sfvi.data.six_cities()
    smoke = data["x"][:, 0, 1]
    assert data["y"].shape == (537, 4)
    assert (smoke == 0).sum() == 350
    assert data["y"].sum() == 326
    assert data["y"][smoke == 0].sum(0).tolist() == [56, 52, 50, 37]
    assert data["y"][smoke == 1].sum(0).tolist() == [31, 39, 35, 26]


@pytest.mark.skipif("SFVI_DATA" not in os.environ, reason="SFVI_DATA names no folder with the original files")
def test_six_cities_is_the_original_file():
    with open(Path(os.environ["SFVI_DATA"]) / "six_cities" / "ohio.csv") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    original = sorted((r["smoke"], *(s["resp"] for s in rows[4 * i : 4 * i + 4])) for i, r in enumerate(rows[::4]))
    data = sfvi.data.six_cities()
    ours = sorted(zip(data["x"][:, 0, 1], *data["y"].T, strict=True))
    np.testing.assert_array_equal(np.array(ours), np.array(original))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 1000))
def test_a_split_deals_every_unit_once(sizes, seed):
    data = {"u": np.arange(sum(sizes)), "v": np.arange(2 * sum(sizes)).reshape(-1, 2)}
    silos, ids = sfvi.data.split_units(data, sizes, seed=seed)
    assert [len(silo["u"]) for silo in silos.values()] == sizes
    assert sorted(np.concatenate([silo["u"] for silo in silos.values()])) == list(range(sum(sizes)))
    for name, silo in silos.items():
        np.testing.assert_array_equal(silo["u"], ids[name])
        np.testing.assert_array_equal(silo["v"][:, 0], 2 * ids[name])
    assert list(silos) == sorted(silos)


@pytest.mark.parametrize("sizes", [[3, 3], [5, 0], [4, 2, -1]])
def test_sizes_must_fit(sizes):
    with pytest.raises(sfvi.OptionError, match="add up to"):
        sfvi.data.split_units({"u": np.arange(5)}, sizes, seed=0)
