"""What an attacker and a newcomer found: every mistake is one sentence, and tells nothing of the data."""

import json
import os
import shutil
import socket
import subprocess
from unittest.mock import ANY

import numpy as np
import pytest
from typer.testing import CliRunner

import sfvi
from sfvi.cli import app
from sfvi.deploy import agreement
from sfvi.deploy.codec import Message, decode, encode
from sfvi.deploy.flower import kits as flower_kits
from sfvi.deploy.flower import sites as flower_sites
from sfvi.deploy.ledger import read_json, write_text
from sfvi.deploy.nvflare import kits, sites
from sfvi.deploy.nvflare.operator import Operator, check_output
from sfvi.deploy.nvflare.roles import SiloRole, site
from sfvi.deploy.silo import Silo, scrubbed
from sfvi.deploy.spec import RunSpec
from sfvi.errors import DataError, DeploymentError, OptionError, RefusalError, WireError

from .federation import HERE, SFVI, environment
from .helpers import CrashError, Direct, Lost, code, make_silos, serve, spec


def told(silo, chosen):
    """A silo's answer to an offer that an honest server would not make."""
    offer = Message("join", chosen.name, code().hash, -1, agreement.offer(chosen, code(), 0), {})
    return decode(silo.handle(encode(offer)), limit=1 << 20)


class NoSilo:
    """A site whose silo does not start."""

    def __init__(self, folder, error):
        self.folder, self._error = str(folder), error

    def silo(self):
        raise self._error


@pytest.mark.parametrize(("error", "traced"), [(RefusalError("its record is gone"), False), (ValueError("42"), True)])
def test_a_silo_that_cannot_take_part_says_why_without_a_traceback(tmp_path, monkeypatch, caplog, error, traced):
    """Unless it is a mistake of the program; its name is put before the reason at the server, and only there."""
    monkeypatch.setattr(site, "here", lambda: NoSilo(tmp_path, error))
    monkeypatch.setattr(site, "log_to", lambda: None)
    role = SiloRole.__new__(SiloRole)  # its __init__ would have this process end with its parent
    role._silo = None
    answer = decode(role._handle(b""), limit=1 << 20)
    site.unlock(role._lock)
    assert answer.fields["reason"] == scrubbed(error)
    (record,) = caplog.records
    assert record.getMessage() == f"this silo cannot take part: {error}"
    assert bool(record.exc_info) == traced


@pytest.mark.parametrize("target", ["SIZES", "sfvi.archive.os.environ", "not_options"])
def test_a_silo_does_not_print_what_a_server_points_at(tmp_path, target):
    silo = make_silos(tmp_path)["a"]
    answer = told(silo, spec(algorithm=f"tests.deploy.small:{target}"))
    assert answer.kind == "refused"
    assert answer.fields["reason"] == (
        "its data, options or program cannot be used (OptionError); its own log says why"
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("patient 42"),
        DataError("patient 42"),
        OptionError("inputs fails on patient 42"),
        sfvi.ArchiveError("'/srv/42/run.npz' is damaged"),
        DeploymentError("Another process uses '/srv/42'"),
        OSError(28, "No space left on device", "/srv/42/run.npz"),
    ],
)
def test_what_others_wrote_into_an_error_stays(error):
    assert "42" not in scrubbed(error)
    assert scrubbed(WireError("step 3 is over.")) == "step 3 is over"


def test_a_full_disk_is_called_so(tmp_path, monkeypatch):
    silos = make_silos(tmp_path)

    def full(*_):
        raise OSError(28, os.strerror(28), "/srv/x")

    monkeypatch.setattr("sfvi.deploy.ledger.write_text", full)
    with pytest.raises(DeploymentError, match=r"The server cannot use its files: No space left on device"):
        serve(tmp_path, spec(), Direct(silos)).run()
    monkeypatch.undo()
    monkeypatch.setattr("sfvi.archive.write", full)
    with pytest.raises(DeploymentError, match=r"No space left on device"):
        serve(tmp_path, spec(), Direct(silos)).run()


def test_a_small_file_is_whole_or_an_error(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_text(path, '{"a": 1}')
    assert read_json(path) == {"a": 1}
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_text(path, '{"a": 2}')
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    path.write_text('{"att')
    with pytest.raises(DeploymentError, match=r"x.json' is damaged"):
        read_json(path)


def test_what_fit_refuses_a_deployed_run_refuses_too(tmp_path):
    with pytest.raises(OptionError, match="num_samples is 2, too few"):
        serve(tmp_path, spec(options={"fixed_noise": {"num_samples": 2}}), Direct(make_silos(tmp_path)))


def test_the_beginning_waits_for_who_is_slow(tmp_path):
    """Also with min_silos: a silo that takes longer than `late` to load its data takes part all the same."""
    silos, lost = make_silos(tmp_path), {"join": 2, "begin": 1}

    def slow(name, request):
        kind = decode(request, limit=1 << 26).kind
        if name == "b" and lost.get(kind, 0):
            lost[kind] -= 1
            return Lost("it is busy", gone=False)
        return None

    fit = serve(tmp_path, spec(min_silos=2, late=0.1, num_rounds=3), Direct(silos, before=slow)).run()
    assert fit.participation["b"].all()


@pytest.mark.parametrize("change", [{"spread": np.ones((7, 7))}, {"evil": np.ones(3)}, {"spread": np.array(9.0)}])
def test_theta_is_what_all_silos_say(tmp_path, change):
    silos = make_silos(tmp_path)

    class Liar:
        def handle(self, request):
            answer = silos["b"].handle(request)
            message = decode(answer, limit=1 << 26)
            if message.kind != "finish":
                return answer
            theta = agreement.theta_tree(message.fields["theta"], message.arrays) | change
            paths, arrays = agreement.theta_arrays(theta)
            return encode(message._replace(fields={"theta": paths}, arrays=arrays))

    with pytest.raises(DeploymentError, match="What silo 'b' answers cannot be used"):
        serve(tmp_path, spec(num_rounds=2), Direct({**silos, "b": Liar()})).run()


def test_sizes_are_those_of_rounds_after_a_crash_too(tmp_path):
    calm = serve(tmp_path / "calm", spec(num_rounds=3), Direct(make_silos(tmp_path / "calm"))).run()

    def crash(name, request):
        if decode(request, limit=1 << 26).kind == "finish":
            raise CrashError

    with pytest.raises(CrashError):
        serve(tmp_path, spec(num_rounds=3), Direct(make_silos(tmp_path), before=crash)).run()
    fit = serve(tmp_path, spec(num_rounds=3), Direct(make_silos(tmp_path))).run()
    assert fit.communication.equals(calm.communication)


def test_a_refused_attempt_leaves_the_status_as_it_is_and_says_what_differs(tmp_path):
    serve(tmp_path, spec(num_rounds=2), Direct(make_silos(tmp_path))).run()
    path = tmp_path / "server" / "run" / "status.json"
    before = path.read_text()
    with pytest.raises(DeploymentError, match="begun with key 0, not 3"):
        serve(tmp_path, spec(num_rounds=2, key=3), Direct({})).run()
    assert path.read_text() == before
    assert json.loads(before)["state"] == "finished"


def test_a_wrong_column_is_told_which_there_are(tmp_path):
    with pytest.raises(sfvi.ModelError, match=r"KeyError: 'y'; the data have data\['Y'\]"):
        Silo("a", code(), sfvi.deploy.SiloInput({"Y": np.ones(5)}), tmp_path)


# Kits.

BOTH = pytest.mark.parametrize("init", [kits.init, flower_kits.init], ids=["NVFlare", "Flower"])


@BOTH
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"silos": ["st.marys"]}, "a silo's name is 'st.marys'"),
        ({"silos": ["x" * 80]}, "at most 60"),
        ({"valid_days": 99_999_999}, "valid_days is"),
        ({"host": "bad host!"}, "host is 'bad host!'"),
        ({"host": ""}, "host is ''"),
        ({"port": 99_999}, "port is 99999"),
    ],
)
def test_kits_that_cannot_be_made_leave_nothing_behind(tmp_path, init, wrong, match):
    options = {"host": "localhost", "port": 8002, "silos": ["north"], "valid_days": 10} | wrong
    with pytest.raises(OptionError, match=match):
        init(tmp_path / "kits", **options)
    assert not (tmp_path / "kits").exists()


@BOTH
def test_damaged_files_are_named(tmp_path, init):
    init(tmp_path / "kits", host="localhost", port=8002, silos=["north"])
    (path,) = list((tmp_path / "kits").glob("*.json"))
    path.write_text("{")
    with pytest.raises(DeploymentError, match=r"json' is damaged"):
        init(tmp_path / "kits", host="localhost", port=8002, silos=["north"])


def test_checks_write_nothing(tmp_path):
    """A check, passed or failed, leaves the settings of a silo that may be running as they are."""
    made = kits.init(tmp_path / "kits", host="localhost", port=8002, silos=["a"])
    flower = flower_kits.init(tmp_path / "flower", host="localhost", port=8000, silos=["a"])
    (made["a"] / "local" / "sfvi.json").write_text("{}")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    def said(*command):
        words = [*SFVI, *command, "--app-dir", str(HERE), "--model", "small:model"]
        done = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=HERE)
        return done.returncode, done.stdout + done.stderr

    start = ["silo", "start", "--kit", str(made["a"]), "--check-only", "--data"]
    assert said(*start, "small:load") == (0, ANY)
    assert said(*start, "small:SIZES") == (1, "Silo 'a': data names 'small:SIZES', which is no function.\n")
    assert said("flower", "silo", "--folder", str(flower["a"]), "--data", "small:SIZES")[0] == 1
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: time for path, time in after.items() if "compiled" not in path.parts} == before


def test_wrong_kits_are_told_at_once(tmp_path):
    made = kits.init(tmp_path / "kits", host="localhost", port=8002, silos=["a"])
    run = RunSpec(name="x", silos=("a",))
    with pytest.raises(DeploymentError, match="is no kit of an operator"):
        Operator(made["a"], run)
    (made["operator"] / "startup" / "client.key").chmod(0o644)
    with pytest.raises(DeploymentError, match="can be read by others"):
        Operator(made["operator"], run)
    (made["a"] / "startup" / "client.crt").write_text("x")
    with pytest.raises(DeploymentError, match=r"client.crt' is damaged"):
        kits.check(made["a"], role="client")


def test_standard_output_is_for_what_was_asked(tmp_path, capfd):
    """What NVFlare says about itself, here while it looks for a server that is not there, would spoil --json."""
    operator = kits.init(tmp_path / "kits", host="localhost", port=1, silos=["a"])["operator"]
    capfd.readouterr()
    with pytest.raises(DeploymentError, match="server cannot be reached"):
        Operator(operator, RunSpec(name="x", silos=("a",), deadline=0.1)).run(tmp_path / "x")
    printed = capfd.readouterr()
    assert "FLARE" in printed.err
    assert printed.out == ""


def test_a_port_that_is_taken_is_said(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        made = kits.init(tmp_path / "kits", host="localhost", port=port, silos=["a"])
        mine = sites.prepare(
            made["server"], role="server", model="cities:model", app_dir=HERE, folder=tmp_path / "elsewhere"
        )
        with pytest.raises(DeploymentError, match=f"Port {port} of this machine cannot be used"):
            sites.install(made["server"], mine, role="server")
        assert not (tmp_path / "elsewhere").exists()


def test_a_kit_without_silos_is_said(tmp_path):
    made = flower_kits.init(tmp_path / "kits", host="localhost", port=8002, silos=["a"])
    (made["server"] / "silos" / "a.pub").unlink()
    with pytest.raises(DeploymentError, match="has no silo's public key"):
        flower_sites.server_commands(made["server"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algorithm", "Site"], "algorithm is 'Site'"),
        (["--option", "num_locl_steps=3"], "no option 'num_locl_steps'"),
        (["--option", 'bound=[["elbo"]]'], "bound is"),
        (["--silo", "alhpa"], "kits were made for north"),
    ],
)
def test_typos_are_found_before_anything_is_asked(tmp_path, arguments, words):
    made = kits.init(tmp_path / "kits", host="localhost", port=8002, silos=["north"])
    result = CliRunner().invoke(app, ["run", "--kit", str(made["operator"]), "--name", "x", *arguments])
    assert isinstance(result.exception, OptionError)
    assert words in str(result.exception)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that is over."""
    folder = tmp_path_factory.mktemp("finished")
    serve(folder, spec(num_rounds=2), Direct(make_silos(folder))).run()
    return folder


def test_status_of_a_silo(finished, tmp_path):
    shutil.copytree(finished / "a", tmp_path / "runs")
    said = CliRunner().invoke(app, ["status", "--kit", str(tmp_path)]).output
    assert "run: finished, its posterior is in" in said


def test_a_result_is_not_written_over_something_else(finished, tmp_path):
    """But over that of the same run, which is fetched again."""
    operator = kits.init(tmp_path / "kits", host="localhost", port=8002, silos=["a"])["operator"]
    result = finished / "server" / "run" / "result"
    before = {path: path.stat().st_mtime_ns for path in result.iterdir()}
    for folder, words in (
        (result, "holds another fit"),
        (tmp_path / "kits", "holds something else already"),
        (result / "global.npz", "is a file"),
    ):
        command = ["run", "--kit", str(operator), "--name", "x", "--silo", "a", "--output", str(folder)]
        assert words in str(CliRunner().invoke(app, command).exception)
    assert {path: path.stat().st_mtime_ns for path in result.iterdir()} == before
    check_output(result, "run")
