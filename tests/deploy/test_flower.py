"""Flower: what its grid means to a run, and a real fleet with TLS and node keys."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from sfvi import archive
from sfvi.deploy import RunSpec, Wire, site
from sfvi.deploy.code import Code
from sfvi.deploy.codec import decode
from sfvi.deploy.exchange import Lost
from sfvi.deploy.flower import apps, keys, kits, sites
from sfvi.deploy.flower.transport import FIELD, RECORD, GridTransport
from sfvi.errors import DeploymentError, OptionError

from . import cities
from .federation import HERE, free_port
from .fleet import Fleet, assert_close, surroundings

pytestmark = pytest.mark.deployed
OPTIONS = {"num_local_steps": 50, "refit_steps": 20}
DEFAULTS = {
    "name": "run",
    "algorithm": "Sites",
    "options": "{}",
    "rounds": 0,
    "key": 0,
    "silos": "",
    "min-silos": 0,
    "late": 10.0,
    "deadline": 600.0,
    "disclose-elbo": False,
    "secure-sum": False,
    "until-converged": False,
    "wire": "float32",
    "reply": "",
    "top-k": 0.0,
}


class Grid:
    """Flower's grid, as far as it is used: nodes by number with their keys; answers are put in by hand."""

    def __init__(self, nodes):
        self.nodes, self.pushed, self.replies, self.full = dict(nodes), [], [], False

    def get_nodes(self):
        return [SimpleNamespace(node_id=number, public_key=key) for number, key in self.nodes.items()]

    def push_messages(self, messages):
        (message,) = messages
        message.metadata.__dict__["_message_id"] = f"m{len(self.pushed)}"
        self.pushed.append(message)
        return [None if self.full else message.metadata.message_id]

    def pull_messages(self, message_ids):
        found = [m for m in self.replies if m.metadata.reply_to_message_id in set(message_ids)]
        self.replies = [m for m in self.replies if m not in found]
        return found

    def answer(self, number, content, sender=None):
        asked = self.pushed[number]
        reply = Message(content, reply_to=asked)
        reply.metadata.__dict__["_src_node_id"] = asked.metadata.dst_node_id if sender is None else sender
        self.replies.append(reply)


def record(content, field=FIELD):
    return RecordDict({RECORD: ConfigRecord({field: content})})


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch):
    """As if Flower had started this process."""
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def kit(tmp_path):
    kits.init(tmp_path / "kits", host="localhost", port=8000, silos=["north", "south"])
    return tmp_path / "kits"


def pem(kit, silo):
    """As Flower tells the key of a node."""
    key = serialization.load_ssh_private_key((kit / silo / "node.key").read_bytes(), None)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


@pytest.fixture
def grid(kit):
    return Grid({11: pem(kit, "north"), 12: pem(kit, "south")})


@pytest.fixture
def transport(grid, kit):
    return GridTransport(grid, kits.table(kit / "server"))


def test_a_message_goes_to_the_node_with_the_silos_key(grid, transport):
    transport.send("south", b"to south")
    transport.send("north", b"to north")
    assert transport.receive(0.0) is None
    there = {message.metadata.dst_node_id: message.content[RECORD][FIELD] for message in grid.pushed}
    assert there == {11: b"to north", 12: b"to south"}
    grid.answer(1, record(b"from north"))
    assert transport.receive(0.0) == ("north", b"from north")
    grid.answer(0, record(b"from south"))
    assert transport.receive(0.0) == ("south", b"from south")
    assert transport.receive(0.0) is None


def test_who_is_not_there_is_asked_again_later(grid, transport):
    del grid.nodes[11]
    transport.send("north", b"1")
    name, lost = transport.receive(0.0)
    assert (name, lost.gone) == ("north", False)
    assert not grid.pushed
    grid.full = True
    transport.send("south", b"2")
    assert isinstance(transport.receive(0.0)[1], Lost)


@pytest.mark.parametrize("code", [0, 3, 4, 5, 8])
def test_an_error_of_flower_loses_one_message(grid, transport, code):
    transport.send("north", b"1")
    transport.receive(0.0)
    grid.answer(0, Error(code, "reason"))
    name, lost = transport.receive(0.0)
    assert (name, lost.gone) == ("north", False)
    assert str(code) in lost.reason


@pytest.mark.parametrize("code", [1, 2, 7])
def test_a_silo_that_cannot_work_ends_the_attempt_and_its_words_stay_there(grid, transport, code):
    transport.send("north", b"1")
    transport.receive(0.0)
    grid.answer(0, Error(code, "patient 42"))
    with pytest.raises(DeploymentError, match="'north'") as caught:
        transport.receive(0.0)
    assert "42" not in str(caught.value)


def test_nodes_with_other_keys_are_not_listened_to(grid, transport, tmp_path, caplog):
    public = keys.node_key(tmp_path / "other")
    grid.nodes = {9: b"", 10: public, **grid.nodes}
    assert transport.online() == {"north": 11, "south": 12}
    assert transport.online() == {"north": 11, "south": 12}
    assert [record.getMessage().split()[1] for record in caplog.records] == ["9", "10"]


def test_two_nodes_with_one_key_stop_everything(grid, transport):
    grid.nodes[13] = grid.nodes[11]
    transport.send("south", b"1")
    with pytest.raises(DeploymentError, match="Two nodes have the key of silo 'north'"):
        transport.receive(0.0)


def test_answers_from_elsewhere_and_of_another_kind_are_refused(grid, transport):
    transport.send("north", b"1")
    transport.receive(0.0)
    grid.answer(0, record(b"2"), sender=12)
    with pytest.raises(DeploymentError, match="Another node"):
        transport.receive(0.0)
    for content in (record("text"), record(b"2", field="other"), RecordDict()):
        transport.send("north", b"1")
        transport.receive(0.0)
        grid.answer(-1, content)
        with pytest.raises(DeploymentError, match="something else"):
            transport.receive(0.0)


def test_kits_are_completed_and_what_is_there_stays(kit):
    before = {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()}
    kits.init(kit, host="localhost", port=8000, silos=["east", "north"])
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(kits.table(kit / "server")) == ["east", "north", "south"]
    (kit / "server" / "silos" / "north.pub").unlink()
    (kit / "server" / "server.crt").unlink()
    kits.init(kit, host="localhost", port=8000, silos=["north"])
    changed = {path.name for path, content in before.items() if path.read_bytes() != content}
    assert changed == {"node.key", "north.pub", "server.crt", "server.key"}
    for path in kit.rglob("*"):
        secret = path.is_dir() or path.suffix in (".key", ".secret")
        assert not secret or path.stat().st_mode & 0o077 == 0, path


def test_kits_refuse_what_does_not_fit(kit, tmp_path):
    for silos in ([], ["north", "north"], ["server"], ["authority"], ["a/b"]):
        with pytest.raises(OptionError):
            kits.init(kit, host="localhost", port=8000, silos=silos)
    with pytest.raises(OptionError, match="localhost:8000"):
        kits.init(kit, host="localhost", port=8001, silos=["north"])
    with pytest.raises(OptionError, match="not empty"):
        kits.init(tmp_path, host="localhost", port=8000, silos=["north"])
    with pytest.raises(DeploymentError, match="kit of 'north', not of the server"):
        sites.prepare(kit / "north", model="cities:model", app_dir=HERE)
    with pytest.raises(DeploymentError, match="no kit"):
        sites.prepare(tmp_path, model="cities:model", app_dir=HERE)
    (kit / "north" / "node.key").chmod(0o644)
    with pytest.raises(DeploymentError, match="chmod 600"):
        sites.prepare(kit / "north", model="cities:model", app_dir=HERE, data="cities:load")
    shutil.copy(kit / "server/silos/north.pub", kit / "server/silos/south.pub")
    with pytest.raises(DeploymentError, match="same key"):
        kits.table(kit / "server")


def test_the_run_configuration_is_a_run():
    assert apps.spec_of(DEFAULTS, ["a", "b"]) == RunSpec(name="run", silos=("a", "b"), algorithm="Sites")
    given = {"options": '{"num_local_steps": 5}', "rounds": 3, "silos": "b, a", "min-silos": 1, "late": 1, "key": 4}
    given |= {"disclose-elbo": True, "until-converged": True, "wire": "float64", "reply": "float32", "top-k": 0.5}
    assert apps.spec_of(DEFAULTS | given, ["a", "b", "c"]) == RunSpec(
        name="run",
        silos=("a", "b"),
        algorithm="Sites",
        options={"num_local_steps": 5},
        key=4,
        num_rounds=3,
        until_converged=True,
        min_silos=1,
        late=1,
        disclose_elbo=True,
        wire=Wire(broadcast="float64", reply="float32", top_k=0.5),
    )
    for wrong in (
        {"options": "{"},
        {"options": "[]"},
        {"rounds": "x"},
        {"late": "soon"},
        {"name": "a/b"},
        {"key": "k"},
    ):
        with pytest.raises(OptionError):
            apps.spec_of(DEFAULTS | wrong, ["a"])


def test_long_runs_are_announced():
    code = Code("sfvi.zoo:logistic_mixed_model")
    spec = apps.spec_of(DEFAULTS | {"algorithm": "SFVI"}, ["a"])
    assert "10,000 rounds of SFVI take about 22 hours with Flower" in apps.estimate(spec, code)
    assert "40 rounds of Sites take about 5 min" in apps.estimate(apps.spec_of(DEFAULTS, ["a"]), code)


@pytest.mark.parametrize("config", [{}, {"site": "/nowhere"}, {"site": 3}])
def test_a_silo_says_nothing_of_what_went_wrong_inside(config, monkeypatch):
    monkeypatch.setattr(site, "log_to", lambda stream: None)
    asked = Message(record(b"1"), 11, "query")
    asked.metadata.__dict__["_message_id"] = "m0"
    reply = apps.answer(asked, SimpleNamespace(node_config=config))
    told = decode(reply.content[RECORD][FIELD], limit=1 << 20)
    assert told.kind == "refused"
    assert "/nowhere" not in told.fields["reason"]


REFERENCE = f"""
import sys, cities, sfvi
inputs = {{name: cities.load(name) for name in cities.SIZES}}
silos, ids = ({{name: each[part] for name, each in inputs.items()}} for part in (0, 1))
algorithm = sfvi.Sites(**{OPTIONS!r})
sfvi.fit(cities.model, silos, unit_ids=ids, algorithm=algorithm, num_rounds=2, key=7, progress=False).save(sys.argv[1])
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A fleet in double precision, with people around it who do not belong to it."""
    folder = tmp_path_factory.mktemp("fleet")
    with Fleet(folder, cities.SIZES, precision="float64") as fleet:
        for name in ("liar", "stranger", "elsewhere"):
            shutil.copytree(fleet.kits / "north", folder / name)
        public = folder / "liar.pub"
        public.write_bytes(keys.node_key(folder / "liar" / "node.key"))
        keys.node_key(folder / "stranger" / "node.key")
        keys.authority(folder / "elsewhere", days=1)
        fleet.flwr("supernode", "register", str(public), "sfvi", "--name", "north")
        for name in ("liar", "stranger", "elsewhere"):
            mine = sites.prepare(folder / name, model="cities:model", app_dir=HERE, data="cities:load")
            sites.install(folder / name, mine)
            command = sites.silo_command(folder / name, port=free_port()).words
            fleet.start(name, [*command, "--max-retries", "1"], folder / name)
        yield fleet


@pytest.fixture(scope="module")
def deployed(fleet):
    """A run with secure sums over the fleet, and a plain one in one process."""
    about = {"algorithm": "Sites", "options": json.dumps(OPTIONS), "rounds": 2, "key": 7, "wire": "float64"}
    number = fleet.begin("cities", **about, **{"secure-sum": True})
    path = fleet.folder / "reference"
    double = {**surroundings(), "JAX_ENABLE_X64": "1"}
    subprocess.run([sys.executable, "-c", REFERENCE, str(path)], env=double, cwd=HERE, check=True)
    return SimpleNamespace(state=fleet.wait(number, "cities"), reference=path)


def test_secure_sums_give_the_result_of_one_process(fleet, deployed):
    """But for what rounding to 2^-32 in each of two rounds makes of it."""
    assert deployed.state == ("finished:completed", "N/A"), fleet.logs()
    found, _ = archive.read(fleet.result("cities") / "global.npz", kind="global posterior")
    assert_close(archive.read(deployed.reference / "global.npz", kind="global posterior")[0], found, 1e-6)
    assert not list(fleet.result("cities").glob("silos/*"))
    for name in fleet.silos:
        lines = map(json.loads, (fleet.kits / name / "runs" / "audit.jsonl").read_text().splitlines())
        kinds = [(line["kind"], *line["arrays"]) for line in lines if line["kind"] in ("round", "unmask")]
        assert kinds == [("round", "masked"), ("unmask",)] * 2


def test_silos_keep_their_posteriors(fleet, deployed):
    for name in fleet.silos:
        found, _ = archive.read(fleet.silo_posterior(name, "cities"), kind="silo posterior")
        assert_close(archive.read(deployed.reference / "silos" / f"{name}.npz", kind="silo posterior")[0], found, 1e-6)


def test_strangers_get_nowhere(fleet, deployed):
    del deployed
    for name in ("stranger", "elsewhere"):
        assert fleet.processes[name].wait(60) != 0
    assert "305" in (fleet.folder / "stranger.log").read_text()
    assert "CERTIFICATE_VERIFY_FAILED" in (fleet.folder / "elsewhere.log").read_text()


def test_who_claims_to_be_north_with_another_key_is_not_asked(fleet, deployed):
    del deployed
    assert fleet.processes["liar"].poll() is None
    log = (fleet.folder / "liar.log").read_text()
    assert "SuperNode ID" in log
    assert "Receiving" not in log


def test_bad_input_is_one_sentence_in_the_status(fleet, deployed):
    del deployed
    number = fleet.begin("other", algorithm="Nope")
    state, details = fleet.wait(number)
    assert state == "finished:failed"
    assert details.endswith(
        "algorithm is 'Nope'; choose SFVI, SFVIAvg, Sites, or module:object of the model's package."
    )
