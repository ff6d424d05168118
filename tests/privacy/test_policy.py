"""What a silo's policy lets out, and what it refuses, before anything is sent."""

import dataclasses
import json

import numpy as np
import pytest

import sfvi
from sfvi.deploy.codec import Message, decode, encode
from sfvi.deploy.silo import Silo
from sfvi.deploy.site import Site
from sfvi.errors import DeploymentError, OptionError, RefusalError
from sfvi.privacy import Audit, Gate, Policy
from sfvi.privacy.gate import rows_per_unit

from ..deploy import small
from ..deploy.helpers import Direct, code, make_silos, serve, spec


def run(folder, policy, **options):
    return serve(folder, spec(**{"num_rounds": 3, **options}), Direct(make_silos(folder, policy=policy))).run()


@pytest.mark.parametrize(
    ("policy", "options", "says"),
    [
        (Policy(algorithms=("Sites",)), {}, "its policy allows Sites, not SFVI"),
        (Policy(), {"disclose_elbo": True}, "its policy does not allow its ELBO to be told"),
        (Policy(min_silos=4), {}, "at least 4 silos"),
        (Policy(max_rounds=2), {}, "its policy allows 2 rounds, not 3"),
    ],
)
def test_runs_that_are_not_allowed_are_refused_before_anything_leaves(tmp_path, policy, options, says):
    with pytest.raises(DeploymentError, match=says):
        run(tmp_path, policy, **options)
    lines = [json.loads(line) for line in (tmp_path / "a" / "audit.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["refused"]
    assert says.split(",")[0] in lines[0]["reason"]


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Policy(models=("0" * 12,)), "does not allow this model"),
        (Policy(min_units=6), "fewer units"),
        (Policy(min_rows=2), "fewer observations"),
        (Policy(disclose=("num_units",)), "parameters to be told"),
    ],
)
def test_a_silo_that_may_not_take_part_does_not_start(tmp_path, policy, says):
    with pytest.raises(RefusalError, match=says):
        Silo("a", code(), small.load("a"), tmp_path, policy)


def test_a_refusal_at_the_start_names_silo_and_hash(tmp_path):
    """So that who has read the code knows what to add to the policy."""
    (tmp_path / "policy.toml").write_text('models = ["000000000000"]')
    model, data = (f"tests.deploy.small:{name}" for name in ("model", "load"))
    about = {"app_dir": ".", "folder": str(tmp_path), "data": data, "policy": str(tmp_path / "policy.toml")}
    with pytest.raises(RefusalError, match=rf"^Silo 'a' does not start: .*\({code().hash[:12]}\)"):
        Site(name="a", model=model, **about).silo_to_start()
    with pytest.raises(RefusalError, match=r"^its policy does not allow"):  # the server names the silo itself
        Site(name="a", model=model, **about).silo()


def test_every_message_is_recorded_and_replies_are_counted(tmp_path):
    policy = Policy(models=(code().hash[:12],), max_rounds=4)
    run(tmp_path, policy)
    lines = [json.loads(line) for line in (tmp_path / "b" / "audit.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["join", "begin", "start", "round", "round", "round", "finish"]
    reply = lines[3]
    assert reply["fields"] == []
    assert all(name.startswith("reply") and entry["norm"] >= 0 for name, entry in reply["arrays"].items())
    assert reply["bytes"] > 100
    text = (tmp_path / "b" / "audit.jsonl").read_text()
    assert not any(f"{value:.6f}"[:7] in text for value in small.observations("b")["y"])
    with pytest.raises(DeploymentError, match="allows 4 replies about this model, and all of them were given"):
        run(tmp_path, policy, name="again")
    run(tmp_path, policy)  # the same questions have the same answers, which are out already


def test_the_number_of_units_may_stay(tmp_path):
    fit = run(tmp_path, Policy(disclose=("theta",)))
    known = Audit(tmp_path / "a" / "audit.jsonl")
    assert len(known.replies(code().hash)) == 3
    assert np.isfinite(fit.posterior.family.loc).all()


def test_a_server_that_asks_for_more_gets_a_refusal(tmp_path):
    """Messages that no honest server sends: the answer is a refusal, and holds nothing."""
    silos = make_silos(tmp_path, policy=Policy())
    serve(tmp_path, spec(num_rounds=2), Direct(silos)).run()
    silo = silos["a"]
    for kind, fields in (("data", {}), ("state", {}), ("round", {"attempt": 0, "elbo": True}), ("finish", {})):
        answer = decode(silo.handle(encode(Message(kind, "run", code().hash, 99, fields, {}))), limit=1 << 20)
        assert answer.kind == "refused"
        assert not answer.arrays


def test_what_a_tampered_silo_side_would_add_does_not_leave(tmp_path):
    gate = Gate(Policy(), Audit(tmp_path / "audit.jsonl"))
    about = {"run": "r", "model": "m", "step": 1, "size": 10, "request": "d"}
    gate.leave("round", {}, {"reply.x": np.ones(3)}, **about)
    for kind, fields, arrays in (
        ("round", {"elbo": 1.0}, {}),
        ("round", {"y": 1}, {}),
        ("round", {}, {"data": np.ones(2)}),
        ("start", {}, {"reply.x": np.ones(2)}),
        ("data", {}, {}),
    ):
        with pytest.raises(RefusalError, match="policy"):
            gate.leave(kind, fields, arrays, **about)


def test_without_a_record_nothing_leaves(tmp_path):
    (tmp_path / "audit.jsonl").mkdir()
    with pytest.raises(RefusalError, match="record"):
        Audit(tmp_path / "audit.jsonl")
    gate = Gate(Policy(), Audit(tmp_path / "file"))
    assert not (tmp_path / "file").exists()  # reading leaves nothing behind
    (tmp_path / "file").mkdir()
    with pytest.raises(RefusalError, match="nothing does"):
        gate.leave("start", {}, {}, run="r", model="m", step=1, size=10, request="d")


def test_a_file_that_is_not_understood_is_refused(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('models = ["0123456789ab"]\ndisclose = ["elbo"]\nmax_rounds = 7\nmin_units = 2\n')
    assert Policy.read(path) == Policy(models=("0123456789ab",), disclose=("elbo",), max_rounds=7, min_units=2)
    for text, says in (
        ("max_round = 3", "'max_round'"),
        ("max_rounds = -1", "max_rounds is -1"),
        ("max_rounds = true", "max_rounds is True"),
        ('disclose = ["data"]', "'data'"),
        ('models = ["abc"]', "12 characters"),
        ("models = 3", "models is 3"),
        ("peers = 3", "peers must give"),
        ('peers = { b = "3f" }', "whole key"),
        (f'peers = {{ b = "{"3F" * 32}" }}', "0 to 9 and a to f"),
        (f'peers = {{ b = "{"3f" * 32}", c = "{"3f" * 32}" }}', "two silos the same key"),
        ("min_sum = 0", "min_sum is 0"),
        ("min_sum = 1", "at least 2, since a sum of one silo is its reply"),
        ('algorithms = ["Sitess"]', "'Sitess'; choose among SFVI, SFVIAvg, Sites, or give module:object"),
        ("epsilon = nan", "epsilon is nan"),
        ("=", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(OptionError, match=says):
            Policy.read(path)
    with pytest.raises(OptionError, match="cannot be read"):
        Policy.read(tmp_path / "nowhere.toml")


def test_rows_of_units_in_plates_and_in_long_tables():
    import numpyro
    import numpyro.distributions as dist

    def population():
        return numpyro.sample("mu", dist.Normal(0.0, 1.0))

    def table(mu, data):
        with numpyro.plate("patients", 3):
            b = numpyro.sample("b", dist.Normal(mu, 1.0))
        with numpyro.plate("visits", data["y"].shape[0]):
            numpyro.sample("y", dist.Normal(b[data["patient"]], 1.0), obs=data["y"])

    model = sfvi.StructuredModel(population, table)
    silo = model.silo_data("a", {"y": np.zeros(6), "patient": np.array([0, 0, 1, 1, 1, 2])})
    assert rows_per_unit(silo, {}) == 1
    silo = model.silo_data("a", {"y": np.zeros(6), "patient": np.array([0, 0, 1, 1, 2, 2])})
    assert rows_per_unit(silo, {}) == 2


def test_algorithms_of_a_package_may_be_named():
    assert Policy(algorithms=("Sites", "hearts:my_options")).algorithms == ("Sites", "hearts:my_options")
    assert Policy(algorithms=()).algorithms == ()


def test_a_sum_of_two_is_remarked_on():
    (said,) = Policy(min_sum=2).remarks
    assert "each can subtract itself" in said
    assert Policy().remarks == []


def test_policies_are_plain_values():
    assert dataclasses.replace(Policy(), min_silos=3).min_silos == 3
