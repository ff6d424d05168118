"""What the operator of a silo can see: the table of what left, what was spent of its privacy, its key."""

import json
import shutil
import stat

import numpy as np
import pytest
from typer.testing import CliRunner

from sfvi.cli import app
from sfvi.deploy.flower import kits as flower_kits
from sfvi.deploy.nvflare import kits
from sfvi.deploy.silo import Silo
from sfvi.deploy.site import NVFLARE_FILE, Site
from sfvi.errors import DeploymentError, OptionError, RefusalError
from sfvi.privacy import Policy

from ..deploy import small
from ..deploy.helpers import Direct, code, make_silos, serve, spec

PRIVATE = {"protects": "unit", "epsilon": 1.0, "clip": 1.0}


def sfvi(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of silo a after a private run and one that was refused, and its policy."""
    folder = tmp_path_factory.mktemp("ran")
    for name in ("private", "again"):
        silos = make_silos(folder, policy=Policy(epsilon=1.2))
        chosen = spec(name=name, num_rounds=3, options={"privacy": PRIVATE})
        try:
            serve(folder, chosen, Direct(silos)).run()
        except DeploymentError:
            assert name == "again"
    (folder / "policy.toml").write_text("epsilon = 1.2\n")
    return folder


@pytest.fixture
def kit(ran, tmp_path):
    """A kit in which this happened."""
    shutil.copytree(ran / "a", tmp_path / "kit" / "runs")
    (tmp_path / "kit" / "local").mkdir()
    mine = Site(
        name="a", model="m:o", app_dir=".", folder=str(tmp_path / "kit" / "runs"), policy=str(ran / "policy.toml")
    )
    mine.write(tmp_path / "kit" / NVFLARE_FILE)
    return tmp_path / "kit"


def test_audit_lists_what_left(kit):
    said = sfvi("silo", "audit", "--kit", kit)
    assert said.exit_code == 0
    header, *rows, last, verdict = said.output.splitlines()
    assert header.split() == ["line", "time", "run", "step", "kind", "what", "bytes", "epsilon"]
    assert [row.split()[4] for row in rows] == ["join", "begin", "start", *["round"] * 3, "finish", "refused"]
    assert "reply" in rows[3]
    assert "norm" in rows[3]
    assert rows[5].split()[-1] == "1"  # epsilon
    assert "privacy budget of 1.2" in rows[-1]
    assert len(last.split()[-1]) == 64
    assert "is whole: 8 lines" in verdict
    some = sfvi("silo", "audit", "--kit", kit, "--run", "private", "--last", 2).output.splitlines()
    assert [row.split()[4] for row in some[1:3]] == ["round", "finish"]
    assert some[-2] == last


def test_audit_says_where_the_chain_breaks(kit):
    path = kit / "runs" / "audit.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    before = json.loads(sfvi("silo", "audit", "--kit", kit, "--json").stdout)
    assert before["whole"]
    assert before["broken"] is None
    assert before["messages"][3]["kind"] == "round"
    path.write_bytes(b"".join(lines[:4] + lines[5:]))
    said = sfvi("silo", "audit", "--kit", kit)
    assert said.exit_code == 1
    assert "broken at line 5: it does not follow on the line before" in said.stderr
    found = json.loads(sfvi("silo", "audit", "--kit", kit, "--json").stdout)
    assert (found["whole"], found["broken"]["line"], found["lines"]) == (False, 5, 4)
    said = sfvi("status", "--kit", kit)
    assert "This silo sends nothing: its record" in said.stderr
    assert said.exit_code == sfvi("status", "--kit", kit, "--json").exit_code == 1
    path.write_bytes(b"".join(lines[:-2]))  # cut off at the end: only who knows the last hash sees it
    assert sfvi("silo", "audit", "--kit", kit).exit_code == 0
    assert sfvi("silo", "audit", "--kit", kit, "--holds", before["last"]).exit_code == 1
    path.write_bytes(b"".join(lines))
    assert sfvi("silo", "audit", "--kit", kit, "--holds", before["last"]).exit_code == 0
    path.unlink()
    said = sfvi("silo", "audit", "--kit", kit)
    assert "the file is gone" in said.stderr
    assert said.exit_code == 1


def test_arrays_without_entries_are_in_the_record_but_not_shown(kit):
    silo = Silo("a", code(), small.load("a"), kit / "runs")
    arrays = {"reply.x": np.ones(4), "reply.none": np.ones((2, 0))}
    about = {"run": "r", "model": code().hash, "step": 1, "size": 10, "request": "d", "release": None}
    silo.gate.leave("round", {}, arrays, **about)
    *_, row, _, _ = sfvi("silo", "audit", "--kit", kit).output.splitlines()
    assert "reply.x[4] norm 2" in row
    assert "reply.none" not in row
    (shown,) = json.loads(sfvi("silo", "audit", "--kit", kit, "--json", "--last", 1).stdout)["messages"]
    assert shown["arrays"]["reply.none"] == {"shape": [2, 0], "norm": 0.0}


def test_names_from_outside_do_not_move_the_cursor(kit):
    silo = Silo("a", code(), small.load("a"), kit / "runs")
    silo.gate.audit.refused(run="\x1b[2J" + "x" * 500, step=1, reason="no")
    said = sfvi("silo", "audit", "--kit", kit).output
    assert "\x1b" not in said
    assert "x" * 450 not in said


def test_status_tells_what_was_spent_and_what_is_left(kit):
    done = sfvi("status", "--kit", kit)
    said = done.output
    assert done.exit_code == 0
    assert "private: finished" in said
    assert "epsilon 1 of 1 spent, 0 left (delta 1e-05, 3 of 3 replies)" in said
    assert "all runs of this silo: epsilon 1 of 1.2 spent, 0.2 left (delta 1e-05)" in said
    found = json.loads(sfvi("status", "--kit", kit, "--json").output)
    assert found["record"] == "whole"
    assert found["budget"]["spent"] == pytest.approx(1.0, abs=0.01)
    assert found["budget"]["left"] == pytest.approx(0.2, abs=0.01)
    (run,) = found["runs"]
    assert run["privacy"]["replies"] == run["privacy"]["rounds"] == 3
    assert run["privacy"]["spent"] == pytest.approx(run["privacy"]["epsilon"])


def test_status_of_a_run_under_way_and_of_one_without_noise(tmp_path):
    silos = make_silos(tmp_path, policy=Policy())
    serve(tmp_path, spec(num_rounds=2), Direct(silos)).run()
    shutil.copytree(tmp_path / "a", tmp_path / "kit" / "runs")
    said = sfvi("status", "--kit", tmp_path / "kit").output
    assert "epsilon" not in said
    assert "budget" in json.loads(sfvi("status", "--kit", tmp_path / "kit", "--json").output)
    assert sfvi("status", "--kit", tmp_path / "server").output.strip() == "No run is known here."


def test_the_key_of_a_silo(tmp_path):
    """Before it was ever started, and the one that it has then."""
    made = kits.init(tmp_path / "kits", host="localhost", port=8002, silos=["north"])
    made |= {"flower": flower_kits.init(tmp_path / "flower", host="localhost", port=8000, silos=["south"])["south"]}
    for name, kit in (("north", made["north"]), ("south", made["flower"])):
        said = sfvi("silo", "key", "--kit", kit)
        key = json.loads(sfvi("silo", "key", "--kit", kit, "--json").stdout)
        assert said.stdout == f'{name} = "{key["key"]}"\n'
        assert "peers" in said.stderr
        assert key["silo"] == name
        assert Silo(name, code(), small.load("a"), kit / "runs").public_key == key["key"]
        assert Policy(peers={name: key["key"]})
        assert stat.S_IMODE((kit / "runs").stat().st_mode) == 0o700
    for kit, error in ((made["server"], DeploymentError), (tmp_path / "flower" / "server", OptionError)):
        assert isinstance(sfvi("silo", "key", "--kit", kit).exception, error)
        assert not (kit / "runs").exists()
    (made["north"] / "runs" / "audit.jsonl").unlink()
    assert isinstance(sfvi("silo", "key", "--kit", made["north"]).exception, RefusalError)
