"""Runs in which only the sum of replies is seen: the same result, whoever leaves, and no way to ask for more."""

import dataclasses
import re
import shutil

import jax
import numpy as np
import pytest

import sfvi
from sfvi.deploy.codec import Message, decode, encode
from sfvi.errors import DeploymentError, OptionError
from sfvi.privacy import Policy

from ..deploy.helpers import CrashError, Direct, Lost, make_silos, serve, spec
from .test_budget import listen

ALGORITHMS = {
    "SFVI": ("SFVI", {}),
    "SFVIAvg": ("tests.deploy.small:averages", {}),
    "Sites": ("Sites", {"num_local_steps": 20}),
    "fixed noise": ("SFVI", {"fixed_noise": {"num_samples": 16, "local_iterations": 5}}),
    "participation": ("tests.deploy.small:most", {}),
}


def run(folder, *, secure=True, transport=None, policy=None, **options):
    policy = policy or Policy(disclose=("num_units", "theta", "elbo"), min_sum=2)
    chosen = spec(**{"num_rounds": 6, "secure_sum": secure, **options})
    return serve(folder, chosen, transport or Direct(make_silos(folder, policy=policy))).run()


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS.values(), ids=ALGORITHMS)
def test_the_result_is_the_plain_one_but_for_rounding(algorithm, options, tmp_path):
    about = {"algorithm": algorithm, "options": options, "disclose_elbo": True}
    plain, secure = (run(tmp_path / str(s), secure=s, **about) for s in (False, True))
    for a, b in zip(*(jax.tree.leaves(fit.posterior.shared) for fit in (secure, plain)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_allclose(secure.elbo, plain.elbo, rtol=1e-6)


def test_nothing_that_leaves_is_a_reply(tmp_path):
    """A masked reply is uniform; the same numbers in plain are nowhere in it."""
    silos = make_silos(tmp_path)
    heard = listen(silos)
    run(tmp_path, transport=Direct(silos))
    answers = [answer for _, question, answer in heard if question.kind == "round"]
    assert len(answers) == 18
    assert all(set(answer.arrays) == {"masked"} and set(answer.fields) == {"shares"} for answer in answers)
    words = np.concatenate([answer.arrays["masked"] for answer in answers]).view(np.uint8)
    bits = np.unpackbits(words)
    assert abs(bits.mean() - 0.5) < 4.5 * 0.5 / np.sqrt(bits.size)


def test_silos_may_leave_and_come_back(tmp_path):
    """With min_silos: the sum is of those who answered, as in the plain run."""

    def absent(name, request):
        message = decode(request, limit=1 << 20)
        if name == "b" and message.kind == "round" and message.step in (2, 3):
            return Lost("it is away", gone=False)
        return None

    options = {"min_silos": 2, "late": 0.01}
    fits = []
    for secure in (False, True):
        silos = make_silos(tmp_path / str(secure), policy=Policy(min_sum=2))
        transport = Direct(silos, before=absent)
        fits.append(run(tmp_path / str(secure), secure=secure, transport=transport, **options))
    assert list(fits[1].participation["b"]) == [True, False, False, True, True, True]
    for a, b in zip(*(jax.tree.leaves(fit.posterior.shared) for fit in fits), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("last", ["round", "unmask"])
def test_silos_that_never_come_back_are_done_without(tmp_path, last):
    """Gone before they answered in step 3, or after it, before they could help with its sum, which has their answer."""
    kinds = {False: (3 if last == "round" else 4, "round"), True: (3, last)}

    def gone_from(step, kind):
        left = set()

        def before(name, request):
            message = decode(request, limit=1 << 20)
            if name == "b" and (left or (message.kind, message.step) == (kind, step)):
                left.add(name)
                return Lost("it has left", gone=True)
            return None

        return before

    fits = []
    for secure, moment in kinds.items():
        silos = make_silos(tmp_path / str(secure), policy=Policy(min_sum=2))
        transport = Direct(silos, before=gone_from(*moment))
        fits.append(run(tmp_path / str(secure), secure=secure, transport=transport, min_silos=2, late=0.01))
    rounds = 2 if last == "round" else 3
    assert list(fits[1].participation["b"]) == [True] * rounds + [False] * (6 - rounds)
    for a, b in zip(*(jax.tree.leaves(fit.posterior.shared) for fit in fits), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_goes_on_after_a_crash_of_the_server_between_the_two_messages(tmp_path):
    def crash(name, request):
        message = decode(request, limit=1 << 20)
        if name == "b" and (message.kind, message.step) == ("unmask", 3):
            raise CrashError

    straight = run(tmp_path / "straight")
    with pytest.raises(CrashError):
        run(tmp_path, transport=Direct(make_silos(tmp_path), before=crash))
    fit = run(tmp_path)
    for a, b in zip(*(jax.tree.leaves(each.posterior.shared) for each in (fit, straight)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


def test_a_server_that_asks_for_more_is_refused(tmp_path):
    silos = make_silos(tmp_path, policy=Policy(min_sum=2))
    heard = listen(silos)
    run(tmp_path, transport=Direct(silos), min_silos=2, late=0.01)
    mine = [(question, answer) for name, question, answer in heard if name == "a"]
    asked = [question for question, _ in mine if question.kind == "unmask"][-1]

    def says(message, **fields):
        changed = message._replace(fields={**message.fields, **fields})
        return decode(silos["a"].handle(encode(Message(*changed))), limit=1 << 20).fields["reason"]

    two = {"answered": ["a", "b"], "shares": {name: asked.fields["shares"][name] for name in ("a", "b")}}
    assert "one step, one sum" in says(asked, **two)
    assert "sums of at least" in says(asked, answered=["a"], shares={"a": asked.fields["shares"]["a"]})
    assert "were not asked" in says(asked, answered=["a", "x"], shares={"a": "", "x": ""})
    own = asked.fields["shares"]["a"]
    assert "who answered" in says(asked, answered=["a", "a", "a"], shares={"a": own})  # a sum of three: itself
    assert "no masked answer" in says(asked, attempt=asked.fields["attempt"] + 1)


def test_where_all_are_needed_a_server_cannot_tell_silos_different_things(tmp_path):
    """That b answered to one, for a share of its own secret, and to another that it left, for the one they share."""

    def crash(name, request):
        if decode(request, limit=1 << 20).kind == "unmask":
            raise CrashError

    silos = make_silos(tmp_path, policy=Policy(min_sum=2))
    heard = listen(silos)
    with pytest.raises(CrashError):
        run(tmp_path, transport=Direct(silos, before=crash))
    rounds = {name: (question, answer) for name, question, answer in heard if question.kind == "round"}
    question, _ = rounds["c"]
    fields = {"attempt": question.fields["attempt"], "answered": ["a", "c"]}
    fields["shares"] = {name: rounds[name][1].fields["shares"]["c"] for name in ("a", "c")}
    asked = Message("unmask", question.run, question.model, question.step, fields, {})
    answer = decode(silos["c"].handle(encode(asked)), limit=1 << 20)
    assert "only 2 silos answered; it takes part in sums of at least 3" in answer.fields["reason"]


def test_keys_that_hide_nothing_are_refused(tmp_path):
    """Of a copied folder, at the server; the server's own for another, or one with which all agree, at the silos."""
    silos = make_silos(tmp_path)
    heard = listen(silos)
    run(tmp_path, transport=Direct(silos))
    begin = next(question for name, question, _ in heard if name == "a" and question.kind == "begin")

    def says(key):
        spec = {**begin.fields["spec"], "name": "new"}
        mine = next(answer for name, asked, answer in heard if name == "a" and asked.kind == "join").fields["key"]
        fields = {**begin.fields, "spec": spec, "keys": {**begin.fields["keys"], "a": mine, "b": key}}
        request = begin._replace(run="new", fields=fields)
        return decode(silos["a"].handle(encode(Message(*request))), limit=1 << 20)

    assert "two silos have the same" in says(begin.fields["keys"]["c"]).fields["reason"]
    assert "of silo 'b' that is none" in says("00" * 32).fields["reason"]
    shutil.copy(tmp_path / "b" / "secret", tmp_path / "c" / "secret")
    with pytest.raises(DeploymentError, match="Silos 'b' and 'c' have the same key"):
        run(tmp_path, name="copied", transport=Direct(make_silos(tmp_path)))


def test_one_mask_is_not_used_twice(tmp_path):
    """Another broadcast in the same step: the difference of the two answers would be that of the replies."""

    def crash(name, request):
        if name == "a" and decode(request, limit=1 << 20).kind == "unmask":
            raise CrashError

    silos = make_silos(tmp_path)
    heard = listen(silos)
    with pytest.raises(CrashError):
        run(tmp_path, transport=Direct(silos, before=crash))
    question = next(question for name, question, _ in heard if name == "a" and question.kind == "round")
    arrays = {n: a + 0.1 if n.endswith("loc") else a for n, a in question.arrays.items()}

    def says(arrays, **fields):
        changed = question._replace(arrays=arrays, fields={**question.fields, **fields})
        return decode(silos["a"].handle(encode(Message(*changed))), limit=1 << 20).fields["reason"]

    assert "one mask is not used twice" in says(arrays, mark=not question.fields["mark"])
    assert "others take part than were drawn" in says(question.arrays, attempt=9, among=["b", "c"])
    assert "others take part than were drawn" in says(question.arrays, attempt=9, among=["a", "b"])
    assert "other entries" in says(question.arrays, attempt=9, weight=2.0)  # by which others would count nothing


@pytest.mark.parametrize(
    ("policy", "options", "says"),
    [
        (Policy(), {"silos": ("a", "b")}, "sum of at least 3 silos"),
        (Policy(), {"min_silos": 2}, "sum of at least 3 silos"),
        (Policy(secure_sum=True), {"secure": False}, "asks for secure sums"),
        (Policy(peers={"b": "0" * 64}), {}, "that is not the one in its policy"),
        (Policy(peers={}), {}, "that is not the one in its policy"),
    ],
)
def test_runs_that_protect_less_than_a_silo_asks_for_are_refused(policy, options, says, tmp_path):
    with pytest.raises(DeploymentError, match=re.escape(says)):
        run(tmp_path, policy=policy, **options)


def test_keys_that_change_within_a_run_are_refused(tmp_path):
    def crash(name, request):
        if decode(request, limit=1 << 20).step == 2:
            raise CrashError

    with pytest.raises(CrashError):
        run(tmp_path, transport=Direct(make_silos(tmp_path), before=crash))
    (tmp_path / "c" / "secret").unlink()
    with pytest.raises(DeploymentError, match=r"another key of this silo than its own|other keys of the silos"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"algorithm": "SFVIAvg", "options": {"num_local_steps": 2}}, "averages a FullGaussian"),
        ({"options": {"bound": ["importance_weighted", 3]}}, "needs each silo's reply"),
    ],
)
def test_algorithms_that_need_more_than_a_sum_are_refused(options, says, tmp_path):
    with pytest.raises(OptionError, match=says):
        run(tmp_path, **options)


def test_a_wire_that_squeezes_has_no_use():
    with pytest.raises(OptionError, match="fixed point"):
        dataclasses.replace(spec(secure_sum=True), wire=sfvi.deploy.Wire(top_k=0.5))


def test_silos_may_share_the_noise_of_a_sum(tmp_path):
    """Each adds a third of the variance; alone, or in a sum of fewer, nobody would be protected."""
    privacy = {"protects": "unit", "epsilon": 1.0, "clip": 1.0, "shared_by": 3}
    mine = Policy(epsilon=1.0, secure_sum=True)
    with pytest.raises(DeploymentError, match="at most 1 silos make together"):  # that takes trust in the others
        run(tmp_path, options={"privacy": privacy}, policy=mine)
    fit = run(tmp_path, options={"privacy": privacy}, policy=dataclasses.replace(mine, max_shared_by=3))
    assert fit.privacy.epsilon <= 1.0
    assert "The sum of what left at least 3 silos is" in str(fit.privacy)
    assert fit.provenance.settings["secure_sum"] == "True"
    for name, options, says in (
        ("plain", {"secure": False}, "share their noise need a secure sum"),
        ("fewer", {"min_silos": 2}, "noise that 3 silos share"),
    ):
        with pytest.raises(DeploymentError, match=says):
            run(tmp_path / name, options={"privacy": privacy}, **options)
