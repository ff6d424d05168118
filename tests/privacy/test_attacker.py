"""A server that asks out of turn: for runs that are no longer allowed, for noise to average, for hidden steps."""

import re

import numpy as np
import pytest

from sfvi.deploy import silo_run
from sfvi.deploy.codec import Message, decode, encode
from sfvi.errors import DeploymentError, OptionError
from sfvi.privacy import Policy

from ..deploy.helpers import Direct, make_silos, serve, spec
from .test_budget import lines, listen

PRIVATE = {"protects": "unit", "epsilon": 1.0, "clip": 1.0}
SHARED = {**PRIVATE, "shared_by": 3}


def steps_of(folder, policy=None, *, privacy=PRIVATE, **options):
    """The silos after a run, and all steps that the server asked silo a for."""
    silos = make_silos(folder, policy=policy or Policy())
    heard = listen(silos)
    chosen = spec(num_rounds=4, options={"privacy": privacy} if privacy else {}, **options)
    serve(folder, chosen, Direct(silos)).run()
    return silos, [question for name, question, _ in heard if name == "a" and question.kind in ("start", "round")]


def ask(silo, question, *, attempt, shift=0.0, log_scale=None):
    """Ask once more in another attempt, from a broadcast that is shifted, or has other scales."""
    arrays = {name: array + shift if name.endswith("loc") else array for name, array in question.arrays.items()}
    if log_scale is not None:
        arrays |= {name: np.full_like(value, log_scale) for name, value in arrays.items() if name.endswith("log_scale")}
    fields = {**question.fields, "attempt": attempt, "mark": True}
    request = Message(question.kind, question.run, question.model, question.step, fields, arrays)
    return decode(silo.handle(encode(request)), limit=1 << 20)


def counted(folder):
    return len({line["request"] for line in lines(folder) if line.get("kind") == "round"})


@pytest.mark.parametrize(("privacy", "secure", "times"), [(PRIVATE, True, 1), (SHARED, True, 2)], ids=["own", "shared"])
def test_noise_that_is_shared_is_new_in_every_attempt_and_counts(tmp_path, privacy, secure, times):
    """Asked for one answer again and again, beside other answers of the others, whose noise would average out."""
    silos, steps = steps_of(tmp_path, privacy=privacy, secure_sum=secure)
    for question in steps:
        assert ask(silos["a"], question, attempt=7).kind == question.kind
    assert counted(tmp_path) == 4 * times


def test_what_is_computed_by_other_versions_counts_anew(tmp_path, monkeypatch):
    """The same noise on numbers that differ in their last digits would tell of the units that they come from."""
    _, steps = steps_of(tmp_path)
    monkeypatch.setattr(silo_run, "versions", lambda: ("another jax",))
    silo = make_silos(tmp_path, policy=Policy())["a"]
    for question in steps:
        assert ask(silo, question, attempt=7).kind == question.kind
    assert counted(tmp_path) == 8


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Policy(algorithms=("Sites",)), "its policy allows Sites"),
        (Policy(min_silos=4), "at least 4 silos"),
        (Policy(min_sum=4), "sum of at least 4"),
        (Policy(peers={"b": "0" * 64}), "not the one in its policy"),
    ],
)
def test_a_run_from_before_the_policy_was_changed_is_refused(tmp_path, policy, says):
    """A server that does not ask to begin, but goes on as if the silo had agreed."""
    _, steps = steps_of(tmp_path, privacy=None, secure_sum=True)
    silo = make_silos(tmp_path, policy=policy)["a"]
    for question in steps:
        answer = ask(silo, question, attempt=7)
        assert answer.kind == "refused"
        assert says in answer.fields["reason"]


def test_a_step_that_was_refused_leaves_no_trace(tmp_path):
    """What is computed from it later would tell of a reply that was never counted."""
    silos, steps = steps_of(tmp_path, Policy(epsilon=1.2))
    silo = silos["a"]
    begin, first, second, *_ = steps
    assert ask(silo, begin, attempt=7).kind == "start"
    silo.gate.policy = Policy(epsilon=1e-3)
    assert "budget" in ask(silo, first, attempt=7, shift=0.1).fields["reason"]
    silo.gate.policy = Policy(epsilon=100.0)
    assert "no state of step 1" in ask(silo, second, attempt=7).fields["reason"]
    again = make_silos(tmp_path, policy=Policy(epsilon=100.0))["a"]
    assert "no state of step 1" in ask(again, second, attempt=7).fields["reason"]
    assert ask(again, first, attempt=7, shift=0.1).kind == "round"


@pytest.mark.parametrize("log_scale", [-80.0, -800.0], ids=str)
def test_numbers_that_break_tell_nothing(tmp_path, log_scale):
    """Scales so small that dividing by them overflows, or not, by the noisy sum: whether it did would be an answer."""
    silos, steps = steps_of(tmp_path, Policy(epsilon=1.2))
    silo, (begin, first, *_) = silos["a"], steps
    assert ask(silo, begin, attempt=7).kind == "start"
    silo.gate.policy = Policy(epsilon=1e-3)
    said = {ask(silo, first, attempt=8 + k, shift=0.1 * k, log_scale=log_scale).fields["reason"] for k in range(1, 5)}
    assert len(said) == 1
    assert "budget" in said.pop()
    assert counted(tmp_path) == 4
    silo.gate.policy = Policy(epsilon=100.0)
    answer = ask(silo, first, attempt=20, shift=0.5, log_scale=log_scale)
    assert answer.kind == "round"
    assert all(np.isfinite(array).all() for array in answer.arrays.values())
    assert counted(tmp_path) == 5


@pytest.mark.parametrize("algorithm", ["averages_with_noise", "ruled_with_noise"])
def test_noise_is_shared_only_where_all_count_the_same(tmp_path, algorithm):
    """Where one silo counts more, or its scales pass through an exponential, the noise of the others is too small."""
    silos = make_silos(tmp_path, policy=Policy())
    chosen = spec(num_rounds=2, algorithm=f"tests.deploy.small:{algorithm}", secure_sum=True)
    with pytest.raises(DeploymentError, match="silos that share their noise must all count the same"):
        serve(tmp_path, chosen, Direct(silos)).run()


@pytest.mark.parametrize("name", ["masks", "secret", "audit.jsonl", "compiled", "Secret"])
def test_a_run_has_no_name_of_a_silos_own_file(name):
    with pytest.raises(OptionError, match=re.escape(f"name is {name!r}")):
        spec(name=name)


def test_a_name_that_leads_out_of_the_folder_is_no_run(tmp_path):
    silos, steps = steps_of(tmp_path, privacy=None)
    for name in ("../a/run", "../b/run"):
        answer = ask(silos["a"], steps[0]._replace(run=name), attempt=7)
        assert "has not joined a run" in answer.fields["reason"]
