"""The commands about this machine, and what all commands have in common."""

import json
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from sfvi import bench, doctor
from sfvi.bench.step import Effort
from sfvi.cli import app


def commands(group, path=()):
    """All commands, by the words that call them."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("command", [*commands(typer.main.get_command(app))], ids=" ".join)
def test_every_command_explains_itself_by_example(command):
    said = CliRunner().invoke(app, [*command, "--help"]).output
    assert f"sfvi {' '.join(command)}" in said.split("Example")[1]
    assert CliRunner().invoke(app, [*command, "--nonsense"]).exit_code == 2


def test_as_a_program():
    """One sentence on standard error, exit code 1, and no traceback."""
    command = [sys.executable, "-m", "sfvi", "fit", "--model", "nix:x", "--silo", "a=b.csv"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == ("model: the module 'nix' cannot be imported (ModuleNotFoundError: No module named 'nix').\n")
    assert CliRunner().invoke(app, ["--version"]).output == f"sfvi {version('sfvi')}\n"
    assert "Exit codes: 0 done" in CliRunner().invoke(app, ["--help"]).output


def test_the_doctor_finds_a_sound_machine_and_a_broken_one(monkeypatch, tmp_path):
    monkeypatch.setenv("SFVI_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "mnist.npz").touch()
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert found["closed form"]["state"] == "ok", found["closed form"]
    assert (found["jax"]["state"], found["jax"]["needed"]) == ("ok", True)
    assert {name: found[name]["state"] for name in ("mnist", "fashion_mnist")} == {
        "mnist": "ok",
        "fashion_mnist": "missing",
    }
    assert "unset SFVI_DATA" in found["fashion_mnist"]["remedy"]
    assert result.exit_code == 0

    monkeypatch.setattr(doctor, "_conjugate", lambda: (0.3, 1.0))
    monkeypatch.setitem(doctor.PARTS, "data", lambda: (_ for _ in ()).throw(RuntimeError("torn cable")))
    lines = CliRunner().invoke(app, ["doctor"]).output.splitlines()
    assert any(line.startswith("fit") and "broken" in line and "+0.300 sds" in line for line in lines)
    assert any("RuntimeError: torn cable" in line for line in lines)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_a_version_that_is_not_known_to_work_is_broken():
    states = [doctor._installed(doctor.Requirement(text))[0] for text in ("jax>=0.1", "jax>=99", "no-such-package")]
    assert states == ["ok", "broken", "missing"]


def test_the_benchmark_compares_in_single_precision(monkeypatch):
    monkeypatch.setattr(bench, "QUICK", Effort(repetitions=1, steps=20))
    result = CliRunner().invoke(app, ["bench", "--quick", "--json"])
    found = json.loads(result.stdout)
    assert found["agree"] is None
    rates = {name: row["rounds_per_second"] for name, row in found["contestants"].items()}
    mine = rates.pop("SFVI")
    assert len(rates) == 3
    for name, rate in rates.items():
        np.testing.assert_allclose(found["contestants"][name]["time_ratio"], rate / mine)


def test_lists_for_scripts(tmp_path):
    (tmp_path / "runs" / "asthma").mkdir(parents=True)
    (tmp_path / "runs" / "asthma" / "run.npz").touch()
    found = json.loads(CliRunner().invoke(app, ["status", "--kit", str(tmp_path), "--json"]).stdout)
    assert found == {"runs": [{"run": "asthma", "state": "under way"}]}
    assert CliRunner().invoke(app, ["status", "--kit", str(tmp_path)]).output == "asthma: under way\n"
    found = json.loads(CliRunner().invoke(app, ["reproduce", "--folder", str(tmp_path), "--json"]).stdout)
    assert found == {"experiments": []}
    assert CliRunner().invoke(app, ["reproduce", "x", "--json"]).exit_code == 2
