"""NVFlare on loopback: the real commands, real processes, real TLS, real kills."""

import json
import random
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import psutil
import pytest

import sfvi
from sfvi import archive
from sfvi.deploy.codec import Message, encode, flatten

from . import cities
from .federation import HERE, SFVI, Federation, environment
from .kills import arrays_of, differences

pytest.importorskip("nvflare", reason="NVFlare is not installed (pip install 'sfvi[nvflare]')")
ROUNDS = 200
pytestmark = pytest.mark.deployed


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with Federation(tmp_path_factory.mktemp("federation"), silos=cities.SIZES) as made:
        yield made


@pytest.fixture(scope="module")
def in_process():
    """What all runs of SFVI come to, in single precision."""
    silos, ids = sfvi.data.split_units(sfvi.data.six_cities(), cities.SIZES, seed=1)
    with jax.enable_x64(False):
        return sfvi.fit(sfvi.zoo.logistic_mixed_model(), silos, unit_ids=ids, key=0, num_rounds=ROUNDS)


def wait_until(condition, timeout=60):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout
        time.sleep(0.2)


def largest_difference(found, expected):
    """Relative to the largest entry of an array."""
    return max(np.abs(f - e).max() / np.abs(e).max() for f, e in zip(found, expected, strict=True))


def assert_same_digits(federation, run, fit):
    """To 1e-6, the result and what stays in silos."""
    found, _ = archive.read(federation.folder / run / "global.npz", kind="global posterior")
    family = fit.posterior.family
    mine = [found[f"family.{name}"] for name in ("loc", "log_scale", "lower")]
    assert largest_difference(mine, [family.loc, family.log_scale, family.lower]) < 1e-6
    for name in cities.SIZES:
        own, _ = archive.read(federation.silo_posterior(name, run), kind="silo posterior")
        block = fit.silo(name).free.units["children"]
        assert largest_difference([own["local.0.loc"], own["local.0.log_scale"]], [block.loc, block.log_scale]) < 1e-6


def test_the_digits_of_one_process(federation, in_process, float32):
    federation.run("sfvi", "--rounds", str(ROUNDS))
    assert_same_digits(federation, "sfvi", in_process)
    assert "finished" in federation.sfvi("status", "--kit", str(federation.kits / "server")).stdout


def test_secure_sums_give_the_same_digits_although_a_silo_was_killed(federation, in_process, float32):
    """A SIGKILL of a silo in the middle, whose work ends with it; nobody has seen a reply of any of the three."""
    begun = federation.begin("secure", "--secure-sum", "--rounds", str(ROUNDS))
    while federation.status("secure").get("round", 0) < 60:
        assert begun.poll() is None, federation.logs()
        time.sleep(0.05)
    orphan = federation.job_process("south")
    federation.kill_only_parent("south")
    wait_until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE, timeout=10)
    federation.start("south")
    assert begun.wait(timeout=240) == 0, federation.logs()
    assert_same_digits(federation, "secure", in_process)
    for name in cities.SIZES:
        lines = (federation.kits / name / "runs" / "audit.jsonl").read_text().splitlines()
        sent = [line for line in map(json.loads, lines) if line.get("run") == "secure" and line.get("kind") == "round"]
        assert len(sent) >= ROUNDS
        assert all(set(line["arrays"]) == {"masked"} for line in sent)
    said = federation.sfvi("silo", "audit", "--kit", str(federation.kits / "south"), "--run", "secure", "--last", "3")
    assert "The record is whole" in said.stdout
    assert " finish " in said.stdout


def test_only_the_reply_leaves_a_silo(federation, float32):
    """On the wire an answer is as long as a Reply of the algorithm with its header, to the byte."""
    result = sfvi.load(federation.folder / "sfvi", cities.model, {})
    assert np.isnan(result.elbo).all()  # nobody was asked to disclose it
    algorithm = sfvi.SFVI().bind(cities.model)
    shared = algorithm.silent(type("Broadcast", (), {"shared": result.posterior.shared})())
    reply = Message("round", "sfvi", "0" * 64, ROUNDS, {}, flatten(shared, prefix="reply", dtype="float32"))
    assert result.communication["bytes from a silo"].tolist() == [len(encode(reply))]


def test_sites_survives_the_death_of_the_server(federation, float32):
    flags = ["--algorithm", "Sites", "--option", "num_local_steps=50", "--option", "refit_steps=20", "--rounds", "8"]
    flags.append("--disclose-elbo")
    told = json.loads(federation.run("calm", *flags, "--json").stdout)
    assert told == {"run": "calm", "folder": str(federation.folder / "calm"), "privacy": None, "warnings": []}
    assert np.isfinite(sfvi.load(federation.folder / "calm", cities.model, {}).elbo).all()
    begun = federation.begin("killed", *flags)
    while federation.status("killed").get("round", 0) < random.Random(0).randint(2, 5):
        assert begun.poll() is None, federation.logs()
        time.sleep(0.05)
    federation.kill("server")
    federation.start("server")
    operator = str(federation.kits / "operator")
    wait_until(lambda: "killed: " in federation.sfvi("status", "--kit", operator, check=False).stdout, timeout=120)
    assert begun.wait(timeout=240) == 0, federation.logs()
    assert differences(arrays_of(federation, "calm"), arrays_of(federation, "killed")) == []


def test_who_does_not_belong_is_not_let_in(federation, tmp_path):
    """A kit of another authority, a kit under another's name, and a kit without its certificate."""
    other = tmp_path / "kits"
    flags = ["--silo", "east", "--silo", "north", "--port", str(federation.port)]
    federation.sfvi("deploy", "init", str(other), *flags)
    flags = ["--model", "cities:model", "--data", "cities:load", "--app-dir", str(HERE)]
    start = ["silo", "start", "--kit", str(other / "east"), *flags]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment()}
    stranger = subprocess.Popen([*SFVI, *start], cwd=tmp_path, **quiet)
    stolen = tmp_path / "stolen"
    shutil.copytree(federation.kits / "north", stolen, ignore=shutil.ignore_patterns("runs", "*-*-*-*-*"))
    command = [sys.executable, "-u", "-m", "nvflare.private.fed.app.client.client_train", "-m", str(stolen)]
    command += ["-s", "fed_client.json", "--set", "secure_train=true", "uid=south", "org=sfvi", "config_folder=config"]
    thief = subprocess.Popen(command, cwd=stolen, **quiet)
    try:
        shutil.copytree(federation.kits / "operator", tmp_path / "operator")  # where nobody knows who has a kit
        flags = ["--name", "strangers", "--silo", "east", "--silo", "north", "--deadline", "12"]
        done = federation.sfvi("run", "--kit", str(tmp_path / "operator"), *flags, check=False)
        assert done.returncode == 1
        assert "'east' did not connect within 12 seconds" in done.stderr
        refused = "authenticated as 'north' but claimed endpoint 'south'"
        wait_until(lambda: refused in (federation.kits / "server" / "log.txt").read_text())
        assert stranger.poll() is None
    finally:
        for process in (thief, stranger):
            process.kill()
            process.wait()
    (other / "east" / "startup" / "client.crt").unlink()
    done = federation.sfvi(*start, check=False)
    assert done.returncode == 1
    assert "startup/client.crt is missing" in done.stderr


def test_a_job_with_code_in_it_is_refused(federation, tmp_path):
    """Nothing that is not installed at a site runs there, not even for the operator."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    from sfvi.deploy import RunSpec
    from sfvi.deploy.nvflare.kits import OPERATOR
    from sfvi.deploy.nvflare.operator import _write_job

    _write_job(tmp_path / "job", RunSpec(name="code", silos=("north", "south")), ["north", "south"])
    (tmp_path / "job" / "app" / "custom").mkdir()
    (tmp_path / "job" / "app" / "custom" / "module.py").write_text("print('hello')")
    session = new_secure_session(OPERATOR, str(federation.kits / "operator"), timeout=10.0)
    try:
        job = session.submit_job(str(tmp_path / "job"))
        begin = time.monotonic()
        while not str(session.get_job_status(job)).startswith("FINISHED") and time.monotonic() - begin < 60:
            time.sleep(0.5)
        assert "BYOC not permitted" in json.dumps(session.get_job_meta(job))
    finally:
        session.close()


def test_keys_are_private_and_in_no_log(federation):
    secrets = [path for path in federation.kits.rglob("*") if path.suffix == ".key" or "authority" in path.parts]
    assert len([path for path in secrets if path.suffix == ".key"]) >= 4
    for path in secrets:
        assert path.stat().st_mode & 0o077 == 0, path
    for path in [*federation.folder.glob("*.log"), *federation.kits.glob("*/log.txt")]:
        assert "PRIVATE KEY" not in path.read_text()


def test_silos_can_be_added_later(tmp_path):
    """By the same authority; what is there stays as it is, and kits may be moved."""
    from sfvi.deploy.nvflare import kits, sites

    first = kits.init(tmp_path / "kits", host="localhost", port=8002, silos=["north"])
    before = (first["north"] / "startup" / "client.key").read_bytes()
    second = kits.init(tmp_path / "kits", host="localhost", port=8002, silos=["south"])
    assert set(second) == {"server", "operator", "north", "south"}
    assert (second["north"] / "startup" / "client.key").read_bytes() == before
    roots = {(second[name] / "startup" / "rootCA.pem").read_bytes() for name in second}
    assert len(roots) == 1
    assert kits.check(second["south"], role="client") == "south"
    with pytest.raises(sfvi.OptionError, match="holds kits for localhost:8002"):
        kits.init(tmp_path / "kits", host="localhost", port=8003, silos=["east"])
    for names, match in ((["a", "a"], "each name once"), (["server"], "cannot be named"), (["../x"], "a silo's name")):
        with pytest.raises(sfvi.OptionError, match=match):
            kits.init(tmp_path / "more", host="localhost", port=8002, silos=names)
    moved = (tmp_path / "kits" / "server").rename(tmp_path / "elsewhere")
    mine = sites.prepare(moved, role="server", model="cities:model", app_dir=HERE, folder=None)
    sites.install(moved, mine, role="server")
    assert str(tmp_path / "elsewhere" / "jobs") in (moved / "local" / "resources.json").read_text()
    assert str(tmp_path / "kits") not in (moved / "local" / "resources.json").read_text()
    (second["south"] / "startup" / "client.key").chmod(0o644)
    with pytest.raises(sfvi.SfviError, match="can be read by others"):
        kits.check(second["south"], role="client")
