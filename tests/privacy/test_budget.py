"""A privacy budget over real messages: counted before each leaves, and kept by the silo alone."""

import json
import shutil
import stat

import numpy as np
import pytest

from sfvi.deploy.codec import Message, decode, encode
from sfvi.errors import DeploymentError, OptionError, RefusalError
from sfvi.privacy import Audit, Policy, Secret
from sfvi.privacy.record import Record

from ..deploy import small
from ..deploy.helpers import CrashError, Direct, make_silos, serve, spec

PRIVATE = {"protects": "unit", "epsilon": 1.0, "clip": 1.0}
BUDGET = Policy(epsilon=1.2)


def run(folder, policy=BUDGET, *, privacy=PRIVATE, transport=None, **options):
    chosen = spec(**{"num_rounds": 4, "options": {"privacy": privacy} if privacy else {}, **options})
    return serve(folder, chosen, transport or Direct(make_silos(folder, policy=policy))).run()


def run_until(folder, last):
    """A run that is broken off at a step."""

    def stop(name, request):
        if decode(request, limit=1 << 20).step == last:
            raise CrashError

    with pytest.raises(CrashError):
        run(folder, transport=Direct(make_silos(folder, policy=BUDGET), before=stop))


def lines(folder, name="a"):
    return [json.loads(line) for line in (folder / name / "audit.jsonl").read_text().splitlines()]


def test_what_was_spent_is_recorded_and_the_run_stops_where_it_would_be_too_much(tmp_path, caplog):
    fit = run(tmp_path)
    assert fit.privacy.epsilon == pytest.approx(1.0, abs=0.01)
    spent = [line["epsilon"] for line in lines(tmp_path) if line["kind"] == "round"]
    assert len(spent) == 4
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(fit.privacy.epsilon)
    with pytest.raises(DeploymentError, match=r"privacy budget of 1\.2, which this would exceed"):
        run(tmp_path, name="again")
    assert lines(tmp_path)[-1]["event"] == "refused"
    assert "of 1.2 is spent at delta 1e-05; this would make it" in caplog.text  # for the silo, not for the server
    run(tmp_path)  # the same questions have the same answers, noise included, and cost nothing
    assert len({line["request"] for line in lines(tmp_path) if line.get("kind") == "round"}) == 4


def test_a_budget_that_ends_within_a_run_halts_it(tmp_path):
    """As when the policy was changed while the run stood still."""
    run_until(tmp_path, 3)
    sent = lines(tmp_path)[-1]["epsilon"]
    silos = make_silos(tmp_path, policy=BUDGET)
    silos["a"].gate.policy = Policy(epsilon=sent * 1.01)
    with pytest.raises(DeploymentError, match="Silo 'a' refuses: its policy has a privacy budget"):
        run(tmp_path, transport=Direct(silos))
    assert lines(tmp_path)[-1]["event"] == "refused"
    assert run(tmp_path).privacy.rounds == 4  # with the budget that it began with it goes on to its end


@pytest.mark.parametrize(
    ("privacy", "policy", "options", "says"),
    [
        (None, BUDGET, {}, "asks for differential privacy"),
        ({**PRIVATE, "epsilon": 3.0}, BUDGET, {}, "which this would exceed"),
        ({"protects": "unit", "noise_multiplier": 0.0, "clip": 1.0}, BUDGET, {}, "asks for differential privacy"),
    ],
)
def test_runs_beyond_the_budget_are_refused_before_anything_leaves(tmp_path, privacy, policy, options, says):
    with pytest.raises(DeploymentError, match=says):
        run(tmp_path, policy, privacy=privacy, **options)
    assert [line["event"] for line in lines(tmp_path)] == ["refused"]


def test_replies_without_noise_leave_no_budget(tmp_path):
    """A silo that was started without one, and whose policy asks for one now."""
    run(tmp_path, Policy(), privacy=None)
    silos = make_silos(tmp_path, policy=Policy())
    for silo in silos.values():
        silo.gate.policy = BUDGET
    with pytest.raises(DeploymentError, match=r"Silo '.' refuses: its record has replies without noise"):
        run(tmp_path, name="again", transport=Direct(silos))


def test_where_replies_left_without_noise_a_silo_with_a_budget_does_not_start(tmp_path):
    """It is told to begin another folder, with another key; nothing else about the folder has changed."""
    run(tmp_path, Policy(), privacy=None)
    with pytest.raises(RefusalError, match=r"replies without noise, .* in another one \(--folder\) .* the key"):
        make_silos(tmp_path, policy=BUDGET)
    assert make_silos(tmp_path, policy=Policy())
    assert run(tmp_path / "another").privacy.rounds == 4
    assert make_silos(tmp_path / "another", policy=BUDGET)


def test_the_elbo_and_the_number_of_units_stay(tmp_path):
    with pytest.raises(OptionError, match="the ELBO has no noise"):
        run(tmp_path, Policy(disclose=("num_units", "theta", "elbo")), disclose_elbo=True)
    silos = make_silos(tmp_path, policy=Policy())
    heard = listen(silos)
    run(tmp_path, transport=Direct(silos))
    joined = {name: answer.fields["num_units"] for name, question, answer in heard if question.kind == "join"}
    assert joined == dict.fromkeys(small.SIZES, 1.0)


def listen(silos):
    """All questions and answers from now on."""
    heard = []
    for name, silo in silos.items():

        def handle(request, name=name, handle=silo.handle):
            answer = handle(request)
            heard.append((name, decode(request, limit=1 << 20), decode(answer, limit=1 << 20)))
            return answer

        silo.handle = handle
    return heard


def numbers(message):
    assert message.kind != "refused", message.fields
    return np.concatenate([array.ravel() for _, array in sorted(message.arrays.items())])


def test_who_asks_again_gets_the_same_answer_and_who_asks_otherwise_other_noise(tmp_path):
    """A server that goes back and leads the silo another way must not get two answers with one noise."""
    silos = make_silos(tmp_path, policy=Policy())
    heard = listen(silos)
    run(tmp_path, transport=Direct(silos))
    mine = [(question, answer) for name, question, answer in heard if name == "a"]
    steps = [question for question, _ in mine if question.kind in ("start", "round")]
    first = numbers(next(answer for question, answer in mine if question is steps[-1]))

    def led(attempt, shift):
        """The last answer, if all broadcasts before it are shifted."""
        for question in steps:
            by = 0.0 if question is steps[-1] else shift
            arrays = {n: a + by if n.endswith("loc") else a for n, a in question.arrays.items()}
            fields = {**question.fields, "attempt": attempt, "mark": True}
            request = encode(Message(question.kind, question.run, question.model, question.step, fields, arrays))
            answer = decode(silos["a"].handle(request), limit=1 << 20)
        return numbers(answer)

    np.testing.assert_array_equal(led(7, 0.0), first)
    assert np.linalg.norm(led(8, 0.01) - first) > 1.0  # far more than the silo's state has moved: other noise


def begin_with(silo, question, **changed):
    """Ask a silo to begin a run that is described otherwise."""
    spec = {**question.fields["spec"], **changed}
    request = Message("begin", spec["name"], question.model, -1, {**question.fields, "spec": spec}, question.arrays)
    return decode(silo.handle(encode(request)), limit=1 << 20)


def test_to_begin_asks_for_as_much_as_to_join(tmp_path):
    """A server that skips the question whether a silo takes part, or changes its mind after the answer."""
    silos = make_silos(tmp_path, policy=Policy(epsilon=1.2, algorithms=("SFVI",)))
    heard = listen(silos)
    run(tmp_path, transport=Direct(silos))
    question = next(question for name, question, _ in heard if name == "a" and question.kind == "begin")
    loud = {"privacy": {**PRIVATE, "epsilon": None, "noise_multiplier": 2000.0}}
    for changed, says in (
        ({"name": "new", "options": {}}, "asks for differential privacy"),
        ({"name": "new", "algorithm": "Sites", "options": {}}, "its policy allows SFVI"),
        ({"name": "new", "options": {"privacy": {**PRIVATE, "shared_by": 2}}}, "need a secure sum"),
        ({"options": loud}, "another run of this name"),
    ):
        answer = begin_with(silos["a"], question, **changed)
        assert answer.kind == "refused"
        assert says in answer.fields["reason"]
    other = question._replace(fields={**question.fields, "bound": [7, None, "units"]})
    assert "another bound" in begin_with(silos["a"], other).fields["reason"]
    silos["a"].gate.policy = Policy()
    assert "neither the run nor this silo" in begin_with(silos["a"], other, name="new").fields["reason"]


def test_a_refused_reply_does_not_leave_under_another_name(tmp_path):
    silos = make_silos(tmp_path, policy=BUDGET)
    run(tmp_path, transport=Direct(silos))
    heard = listen(silos)
    silos["a"].gate.policy = Policy(epsilon=1e-3)
    with pytest.raises(DeploymentError, match="budget"):
        run(tmp_path, name="more", transport=Direct(silos))
    assert not [answer for name, _, answer in heard if name == "a" and answer.arrays and answer.kind == "round"]


@pytest.mark.parametrize("change", [{"noise": ["much", 1.0]}, {"request": ["a"]}, {"run": None}, {"noise": [2, 1.0]}])
def test_a_record_whose_lines_mean_nothing_is_no_record(tmp_path, change):
    """Though its chain be whole."""
    path = tmp_path / "audit.jsonl"
    entry = {"run": "r", "model": "m", "request": "q", "noise": [2.0, 1.0]}
    Record(path, lambda _: None).add(entry)
    assert len(Audit(path).releases()) == 1
    Record(path, lambda _: None).add({**entry, **change})
    with pytest.raises(RefusalError, match="damaged"):
        Audit(path)


def test_a_new_secret_makes_new_noise_and_that_counts(tmp_path):
    """Who loses the file of its secret cannot give the same answers again, and must not give others for nothing."""
    run(tmp_path)
    (tmp_path / "a" / "secret").unlink()
    for state in (tmp_path / "a" / "run").glob("state-*.npz"):
        state.unlink()
    silos = make_silos(tmp_path, policy=BUDGET)
    shutil.rmtree(tmp_path / "server")
    for name in ("b", "c"):
        shutil.rmtree(tmp_path / name / "run")
    with pytest.raises(DeploymentError, match="Silo 'a' refuses: its policy has a privacy budget"):
        run(tmp_path, transport=Direct(silos))


def test_a_run_that_another_one_left_no_budget_for_halts_and_can_go_on(tmp_path):
    """Two runs that would each have been affordable: the second halts before a reply too many, and loses nothing."""
    run_until(tmp_path, 2)
    run(tmp_path, name="other")
    with pytest.raises(DeploymentError, match=r"Silo '.' refuses: its policy has a privacy budget of 1\.2"):
        run(tmp_path)
    assert run(tmp_path, Policy(epsilon=3.0)).privacy.rounds == 4
    assert lines(tmp_path)[-1]["kind"] == "finish"


def test_the_secret_is_the_silos_alone(tmp_path):
    secret = Secret(tmp_path / "secret")
    first = secret.key("question")
    assert first == secret.key("question") == Secret(tmp_path / "secret").key("question")
    assert first != secret.key("other")
    assert first != Secret(tmp_path / "other" / "secret").key("question")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert list(tmp_path.glob("secret.*")) == []
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(RefusalError, match="damaged"):
        secret.key("question")


def test_a_policy_file_holds_the_budget(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("epsilon = 2\ndelta = 1e-6\n")
    assert Policy.read(path) == Policy(epsilon=2, delta=1e-6)
    for text in ("epsilon = 0", "epsilon = true", 'epsilon = "much"', "delta = 1.5", "epsilon = inf"):
        path.write_text(text)
        with pytest.raises(OptionError, match=f"policy: {text.split()[0]}"):
            Policy.read(path)
