"""What a machine brings along: code, data, settings."""

import json

import numpy as np
import pandas as pd
import pytest

from sfvi.deploy import data, site, status
from sfvi.deploy.code import Code, source_hash
from sfvi.deploy.data import SiloInput
from sfvi.deploy.ledger import Cadence
from sfvi.deploy.wire import Wire, pack, unpack
from sfvi.errors import DataError, DeploymentError, OptionError, WireError


@pytest.fixture
def table(tmp_path):
    frame = pd.DataFrame({"patient": [7, 8, 9], "y": [0.5, 1.5, 2.5], "treated": [0, 1, 1]})
    frame.to_csv(tmp_path / "silo.csv", index=False)
    frame.to_parquet(tmp_path / "silo.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["silo.csv", "silo.parquet"])
def test_tables(table, name):
    found = data.read("north", str(table / name), unit_ids="patient")
    assert list(found.data) == ["y", "treated"]
    assert found.unit_ids.tolist() == [7, 8, 9]
    assert list(data.read("north", str(table / name)).data) == ["patient", "y", "treated"]


def test_loaders_get_the_name_of_the_silo():
    assert len(data.read("a", "tests.deploy.small:load").data["y"]) == 5
    assert isinstance(data.read("a", "tests.deploy.small:observations"), SiloInput)


@pytest.mark.parametrize(
    ("source", "options", "match"),
    [
        ("missing.csv", {}, "there is no file"),
        ("notes.txt", {}, "give a .csv or .parquet file, or module:function"),
        ("silo.csv", {"unit_ids": "id"}, "has no column 'id'"),
        ("empty.csv", {}, "is empty: .* has no rows"),
        ("broken.parquet", {}, "cannot be read"),
        ("tests.deploy.small:SIZES", {}, "which is no function"),
        ("tests.deploy.nothing:load", {}, "cannot be imported"),
        ("tests.deploy.small:nothing", {}, "has no 'nothing'"),
    ],
)
def test_data_that_are_none(table, monkeypatch, source, options, match):
    monkeypatch.chdir(table)
    (table / "empty.csv").write_text("y,treated\n")
    (table / "broken.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises((DataError, OptionError), match=match):
        data.read("north", source, **options)


def test_a_loader_that_fails_names_the_silo():
    with pytest.raises(DataError, match=r"Silo 'x': the loader .* fails \(ValueError"):
        data.read("x", "tests.deploy.small:load")


def test_models_are_named(tmp_path):
    assert Code("tests.deploy.small:model").model is not None
    assert Code("sfvi.zoo:logistic_mixed_model").model is not None
    for reference, match in (
        ("tests.deploy.small", "give module:object"),
        ("tests.deploy.small:SIZES", "name a StructuredModel"),
        ("no.such:model", "cannot be imported"),
    ):
        with pytest.raises(OptionError, match=match):
            Code(reference)


def test_the_hash_is_of_all_sources(tmp_path, monkeypatch):
    package = tmp_path / "study"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("from .parts import x\n")
    (package / "parts.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = source_hash("study.model:x")
    assert before == source_hash("study.model:x")
    assert before != source_hash("study.model:y")
    (package / "parts.py").write_text("x = 2\n")
    assert before != source_hash("study.model:x")


def test_a_site_there_and_back(tmp_path):
    made = site.Site(name="north", model="m:x", app_dir="/a", folder=str(tmp_path), data="d.csv", precision="float64")
    made.write(tmp_path / "site.json")
    environment = made.environment(tmp_path / "site.json")
    assert site.here(environment) == made
    assert environment["JAX_ENABLE_X64"] == "1"
    with pytest.raises(DeploymentError, match="not started by sfvi"):
        site.here({})
    with pytest.raises(OptionError, match="precision is 'half'"):
        site.Site(name="north", model="m:x", app_dir="/a", folder="f", precision="half")


def reply():
    rng = np.random.default_rng(0)
    return [{"a": rng.normal(size=7), "b": rng.normal(size=(2, 3))} for _ in range(40)]


@pytest.mark.parametrize("wire", [Wire(reply="bfloat16"), Wire(top_k=0.2), Wire(top_k=0.1, reply="bfloat16")])
def test_nothing_is_lost_for_good(wire):
    """What arrived and what is left over add up to what was said."""
    silent = {"a": np.zeros(7), "b": np.zeros((2, 3))}
    residual, arrived = np.zeros(13), np.zeros(13)
    for said in reply():
        arrays, residual = pack(wire, said, silent, residual)
        found = unpack(wire, arrays, silent, squeezed=True)
        arrived += np.concatenate([np.ravel(found["a"]), np.ravel(found["b"])])
    total = sum(np.concatenate([said["a"], said["b"].ravel()]) for said in reply())
    np.testing.assert_allclose(arrived + residual, total, rtol=1e-10)
    assert np.abs(residual).max() < 20


def test_top_k_is_checked():
    wire, silent = Wire(top_k=0.5), {"a": np.zeros(4)}
    fine, _ = pack(wire, {"a": np.arange(4.0)}, silent, np.zeros(4))
    assert fine["index"].tolist() == [2, 3]
    for index in ([3, 2], [2, 9], [1], [2, 2]):
        with pytest.raises(WireError):
            unpack(wire, {**fine, "index": np.array(index, np.uint32)}, silent, squeezed=True)


@pytest.mark.parametrize("options", [{"broadcast": "int8"}, {"reply": "half"}, {"top_k": 0}, {"top_k": True}])
def test_wires_that_mean_nothing(options):
    with pytest.raises(OptionError, match="wire: "):
        Wire(**options)


def test_saving_takes_its_share_and_no_more():
    """A save that costs as much as a round is made every 25th; one that costs nothing every time."""
    for cost, every in ((0.01, 25), (0.0, 1)):
        cadence, marks = Cadence(always=False), []
        for _ in range(400):
            mark = cadence.due()
            marks.append(mark)
            cadence.took(0.01 + cost * mark, marked=mark)
        assert np.mean(marks[200:]) == pytest.approx(1 / every, rel=0.2)
    slow = Cadence(always=False)
    slow.took(30.0, marked=False)
    assert slow.due()


def test_a_line_for_people():
    state = {"run": "r", "algorithm": "SFVI", "state": "running", "round": 3, "rounds": 9, "answered": ["a"]}
    state |= {"rounds per second": 2.0, "seconds left": 3723.0, "elbo": -12.5, "waiting for": ["b"]}
    line = status.line(json.loads(json.dumps(state)))
    for part in ("round 3/9", "answered: a", "waiting for: b", "ELBO -12.50", "2 rounds/s", "1:02:03 left"):
        assert part in line
