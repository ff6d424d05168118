"""All bytes between two silos and a server, on a real wire: what is not meant to leave is nowhere in them."""

import json

import numpy as np
import pytest

import sfvi
from sfvi import archive

from . import patients
from .federation import HERE
from .fleet import Fleet, assert_close
from .recorder import Recorder

pytestmark = pytest.mark.deployed
OPTIONS = {"num_local_steps": 20, "refit_steps": 20}
RUN = {"algorithm": "Sites", "rounds": 2, "options": json.dumps(OPTIONS), "wire": "float64"}


class Spied(Fleet):
    """A fleet whose silos reach the server through a recorder, and whose server was tampered with."""

    def __init__(self, folder):
        super().__init__(folder, model="patients:model", data="patients:load", precision="float64")
        server = self.kits / "server"
        about = {"certificate": server / "server.crt", "key": server / "server.key", "authority": server / "ca.crt"}
        self.recorder = Recorder(self.port, **about)
        for name in self.silos:
            self.commands[name] = [
                part.replace(str(self.port), str(self.recorder.port)) for part in self.commands[name]
            ]

    def environment(self, kit):
        found = super().environment(kit)
        if kit == self.kits / "server":
            path = [str(HERE / "tampered"), *filter(None, [found.get("PYTHONPATH")])]
            found |= {"PYTHONPATH": ":".join(path), "TAMPERED": str(self.folder / "tampered.json")}
        return found


@pytest.fixture(scope="module")
def spied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spied")
    fleet = Spied(folder)
    with fleet.recorder, fleet:
        state = fleet.run("spied", **RUN)
        assert state[0] == "finished:completed", f"{state}\n{fleet.logs()}"
    return fleet


def test_a_deployed_run_gives_the_result_of_one_process(spied, tmp_path):
    """The result and the silos' posteriors, although a server that asks for more than it may was refused twice."""
    inputs = {name: patients.load(name) for name in spied.silos}
    silos, ids = ({name: each[part] for name, each in inputs.items()} for part in (0, 1))
    fit = sfvi.fit(patients.model, silos, unit_ids=ids, algorithm=sfvi.Sites(**OPTIONS), num_rounds=2, key=0)
    fit.save(tmp_path)
    found, _ = archive.read(spied.result("spied") / "global.npz", kind="global posterior")
    assert_close(archive.read(tmp_path / "global.npz", kind="global posterior")[0], found, 1e-12)
    for name in spied.silos:
        found, _ = archive.read(spied.silo_posterior(name, "spied"), kind="silo posterior")
        assert_close(archive.read(tmp_path / "silos" / f"{name}.npz", kind="silo posterior")[0], found, 1e-12)


def words(values):
    """How numbers could be written: in double precision, and as text."""
    found = set()
    for value in np.ravel(values):
        found |= {np.float64(value).tobytes(), f"{value:.7f}"[:9].encode()}
    return found


def test_what_leaves_is_seen_by_the_recorder(spied):
    """The recorder can find numbers: those of the broadcasts, which all may see, are there."""
    arrays, _ = archive.read(spied.result("spied") / "global.npz", kind="global posterior")
    final = [array for name, array in arrays.items() if array.dtype == np.float64 and array.size]
    assert final
    assert all(value.tobytes() in spied.recorder.to_silos for array in final for value in np.ravel(array))
    assert len(spied.recorder.from_silos) > 2000


@pytest.mark.parametrize("silo", ["north", "south"])
def test_no_datum_id_or_local_parameter_is_on_the_wire(spied, silo):
    mine, seen = patients.load(silo), bytes(spied.recorder.from_silos + spied.recorder.to_silos)
    secret = set().union(*(words(values) for values in mine.data.values()))
    secret |= {np.float32(value).tobytes() for values in mine.data.values() for value in values}
    for number in mine.unit_ids:
        secret |= {str(number).encode(), np.int64(number).tobytes()}
    posterior = sfvi.SiloPosterior.load(spied.silo_posterior(silo, "spied"), patients.model, mine.data)
    secret |= set().union(
        *(words(leaf) for leaf in posterior.free.units["patients"].__dict__.values() if leaf is not None)
    )
    for path in spied.kits.glob(f"{silo}/runs/spied/*.npz"):  # states of rounds before the last
        with np.load(path) as file:
            for name in file.files:
                if ".family" in name and file[name].dtype == np.float64:
                    secret |= {value.tobytes() for value in np.ravel(file[name]) if value != 0}
    assert len(secret) > 200
    assert not [each for each in secret if each in seen]


def test_a_tampered_server_gets_refusals(spied):
    said = json.loads((spied.folder / "tampered.json").read_text())
    assert set(said) == {"data", "round"}
    assert all(kind == "refused" and not arrays for kind, _, arrays in said.values()), said
    lines = [json.loads(line) for line in (spied.kits / "north" / "runs" / "audit.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "refused" for line in lines) == 2
