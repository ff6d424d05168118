"""Both sides of a run, the codec between them and files below them; only the network is left out."""

import logging
import random
import shutil

import jax
import numpy as np
import pytest

import sfvi
from sfvi.deploy import SiloInput, Wire
from sfvi.deploy.agreement import Order
from sfvi.deploy.codec import Message, decode, encode
from sfvi.deploy.silo import Silo
from sfvi.errors import DataError, DeploymentError, OptionError
from sfvi.natural import natural

from . import small
from .helpers import CrashError, Direct, Lost, code, make_silos, serve, spec

ALGORITHMS = {
    "SFVI": ("SFVI", {}, sfvi.SFVI()),
    "SFVIAvg": ("SFVIAvg", {"num_local_steps": 5}, sfvi.SFVIAvg(num_local_steps=5)),
    "Sites": ("Sites", {"num_local_steps": 20}, sfvi.Sites(num_local_steps=20)),
    "fast start": (
        "SFVI",
        {"fast_start": {"rounds": 2, "num_local_steps": 5}},
        sfvi.SFVI(fast_start=sfvi.FastStart(rounds=2, num_local_steps=5)),
    ),
    "fixed noise": (
        "SFVI",
        {"fixed_noise": {"num_samples": 16, "local_iterations": 5, "replicates": 2, "replicate_rounds": 2}},
        sfvi.SFVI(fixed_noise=sfvi.FixedNoise(num_samples=16, local_iterations=5, replicates=2, replicate_rounds=2)),
    ),
    "importance": (
        "SFVI",
        {"bound": ["importance_weighted", 3]},
        sfvi.SFVI(bound=sfvi.bounds.importance_weighted(3)),
    ),
    "participation": ("tests.deploy.small:half", {}, small.half),
    "Sites, participation": ("tests.deploy.small:half_of_sites", {}, small.half_of_sites),
}


def data():
    return {name: small.observations(name) for name in small.SIZES}


def numbers(fit, folder, run="run"):
    """All that a run leaves behind, at the server and in the silos."""
    found = {f"shared{jax.tree_util.keystr(p)}": leaf for p, leaf in jax.tree.leaves_with_path(fit.posterior.shared)}
    found |= {f"trace.{name}": values for name, values in fit.trace.items()}
    for name, values in data().items():
        posterior = sfvi.SiloPosterior.load(folder / name / run / "posterior.npz", small.model, values)
        found |= {f"{name}{jax.tree_util.keystr(p)}": x for p, x in jax.tree.leaves_with_path(posterior.free)}
    return {name: np.asarray(leaf) for name, leaf in found.items()}


@pytest.mark.parametrize(("algorithm", "options", "same"), ALGORITHMS.values(), ids=ALGORITHMS)
def test_the_digits_of_one_process(tmp_path, algorithm, options, same):
    rounds = 3 if "fixed_noise" in options else 12  # L-BFGS makes much of the last digit
    chosen = spec(algorithm=algorithm, options=options, disclose_elbo=True, num_rounds=rounds)
    fit = serve(tmp_path, chosen, Direct(make_silos(tmp_path))).run()
    expected = sfvi.fit(small.model, data(), key=0, num_rounds=rounds, algorithm=same)
    found = numbers(fit, tmp_path)
    close = {"rtol": 1e-9, "atol": 1e-9} if "fixed_noise" in options else {"rtol": 1e-12, "atol": 1e-14}
    for path, leaf in jax.tree.leaves_with_path(expected.posterior.shared):
        np.testing.assert_allclose(found[f"shared{jax.tree_util.keystr(path)}"], leaf, **close)
    for name in small.SIZES:
        for path, leaf in jax.tree.leaves_with_path(expected.silo(name).free):
            np.testing.assert_allclose(found[name + jax.tree_util.keystr(path)], leaf, **close)
    np.testing.assert_allclose(fit.elbo, expected.elbo, **close)
    np.testing.assert_allclose(fit.theta["spread"], expected.theta["spread"], **close)
    assert fit.participation.equals(expected.participation)
    np.testing.assert_allclose(fit.path, expected.path, **close)
    if expected.noise_error is not None:
        np.testing.assert_allclose(fit.noise_error, expected.noise_error, **close)
    loaded = sfvi.load(tmp_path / "server" / "run" / "result", small.model, {})
    np.testing.assert_array_equal(loaded.elbo, fit.elbo)
    assert loaded.provenance == fit.provenance
    assert (fit.provenance.engine, fit.provenance.key) == ("deployed", expected.provenance.key)
    assert fit.provenance.sent == expected.provenance.sent
    assert fit.provenance.options == expected.provenance.options


def test_float32_on_the_wire_of_a_run_in_float64(tmp_path):
    """What single precision loses comes with the next reply."""
    fit = serve(
        tmp_path, spec(wire=Wire(), algorithm="Sites", options={"num_local_steps": 20}), Direct(make_silos(tmp_path))
    ).run()
    expected = sfvi.fit(small.model, data(), key=0, num_rounds=12, algorithm=sfvi.Sites(num_local_steps=20))
    np.testing.assert_allclose(fit.posterior.family.loc, expected.posterior.family.loc, rtol=1e-5)
    assert not np.array_equal(fit.posterior.family.loc, expected.posterior.family.loc)
    assert np.isnan(fit.elbo).all()  # nobody was asked to disclose it
    assert "nan" not in repr(fit)


@pytest.mark.parametrize("algorithm", ["Sites", "fast start"])
def test_crashes_change_no_digit(tmp_path, algorithm):
    """Server and silos, dropped at random moments and made again from what is on disk."""
    name, options, _ = ALGORITHMS[algorithm]
    chosen = spec(algorithm=name, options=options, num_rounds=6)
    calm = numbers(serve(tmp_path / "calm", chosen, Direct(make_silos(tmp_path / "calm"))).run(), tmp_path / "calm")
    rng, silos, folder, crashes = random.Random(algorithm), make_silos(tmp_path), tmp_path, 0

    def perhaps(*_):
        if crashes < 4 and rng.random() < 0.1:
            raise CrashError

    while True:
        moment = rng.choice(["before", "after"])
        try:
            fit = serve(folder, chosen, Direct(silos, **{moment: perhaps})).run()
            break
        except CrashError:
            crashes += 1
            if rng.random() < 0.7:  # not only the server
                victim = rng.choice(sorted(silos))
                silos |= make_silos(folder, [victim])
    assert crashes >= 2
    found = numbers(fit, folder)
    assert set(found) == set(calm)
    for item, expected in calm.items():
        np.testing.assert_array_equal(found[item], expected, err_msg=item)


def test_a_finished_run_is_not_done_again(tmp_path):
    first = serve(tmp_path, spec(num_rounds=3), Direct(make_silos(tmp_path))).run()

    def nobody(*_):
        raise AssertionError("asked again")

    again = serve(tmp_path, spec(num_rounds=3), Direct({}, before=nobody)).run()
    np.testing.assert_array_equal(first.posterior.family.loc, again.posterior.family.loc)


def test_silos_without_a_memory_of_their_own(tmp_path):
    """As in Flower: a new process for every message."""
    chosen = spec(num_rounds=2, silos=("a", "b"))
    calm = serve(tmp_path / "calm", chosen, Direct(make_silos(tmp_path / "calm"))).run()
    silos = make_silos(tmp_path)
    transport = Direct(silos, forgetful=True, before=lambda name, _: silos.update(make_silos(tmp_path, [name])))
    found = serve(tmp_path, chosen, transport).run()
    for one, other in zip(*(jax.tree.leaves(fit.posterior.shared) for fit in (calm, found)), strict=True):
        np.testing.assert_array_equal(one, other)


class Away:
    """A silo that is not there in some rounds, and late in others."""

    def __init__(self, silos, name, *, away=(), answer_anyway=False):
        self.silos, self.name, self.away, self.anyway = silos, name, set(away), answer_anyway

    def __call__(self, name, request):
        step = decode(request, limit=1 << 26).step
        if name != self.name or step not in self.away:
            return None
        if self.anyway:
            self.silos[name].handle(request)  # it did the work, but its answer got lost
        return Lost("no connection", gone=False)


@pytest.mark.parametrize("did_the_work", [False, True])
def test_min_silos_goes_on_and_takes_the_silo_back(tmp_path, did_the_work):
    """Sites stays consistent: the server's product is that of the silos' own sites, whoever was away."""
    silos = make_silos(tmp_path)
    away = Away(silos, "b", away={3, 4, 5}, answer_anyway=did_the_work)
    chosen = spec(algorithm="Sites", options={"num_local_steps": 20}, min_silos=2, late=0.2)
    fit = serve(tmp_path, chosen, Direct(silos, before=away)).run()
    assert fit.participation["b"].tolist() == [number not in (2, 3, 4) for number in range(12)]  # step 0 is the start
    assert fit.participation[["a", "c"]].all(axis=None)
    states = [next(held.state for held in silo._run._held.values() if held.state) for silo in silos.values()]
    precision = np.eye(2) / 9.0 + sum(np.asarray(state.site.latents.precision) for state in states)
    np.testing.assert_allclose(natural(fit.posterior.family).precision, precision, rtol=1e-9)


def begun(folder):
    """A run that was interrupted in the middle."""
    silos = make_silos(folder)

    def stop(name, request):
        if decode(request, limit=1 << 26).step == 6:
            raise CrashError

    with pytest.raises(CrashError):
        serve(folder, spec(), Direct(silos, before=stop)).run()
    return silos


def test_all_silos_are_needed_by_default(tmp_path):
    silos = begun(tmp_path)
    away = Away(silos, "b", away=range(6, 99))
    with pytest.raises(DeploymentError, match=r"No answer from 'b' within 2 seconds \(step 6\); nothing is lost"):
        serve(tmp_path, spec(deadline=2.0), Direct(silos, before=away)).run()
    fit = serve(tmp_path, spec(deadline=3.0), Direct(silos)).run()
    assert len(fit.elbo) == 12
    assert fit.participation.all(axis=None)


def test_the_beginning_needs_everyone(tmp_path):
    silos = make_silos(tmp_path)
    chosen = spec(min_silos=2, late=0.1, deadline=1.0)
    away = Direct(silos, before=Away(silos, "b", away={-1}))
    with pytest.raises(DeploymentError, match=r"No answer from 'b' within 1 seconds \(before the first round\)"):
        serve(tmp_path, chosen, away).run()
    gone = Direct(silos, before=lambda name, _: Lost("dead", gone=True) if name == "b" else None)
    with pytest.raises(DeploymentError, match=r"cannot begin: Silo 'b' is gone. All named silos must be there once"):
        serve(tmp_path, chosen, gone).run()


def other_data(name):
    found = small.observations(name)
    return SiloInput({"y": found["y"] + (name == "b")})


def one_more(name):
    found = small.observations(name)["y"]
    return SiloInput({"y": np.append(found, 1.0) if name == "b" else found})


@pytest.mark.parametrize(("load", "match"), [(other_data, "other data"), (one_more, "other data")])
def test_a_silo_that_comes_back_with_other_data_is_refused(tmp_path, load, match):
    silos = begun(tmp_path)
    silos["b"] = make_silos(tmp_path, ["b"], load)["b"]
    with pytest.raises(DeploymentError, match=f"Silo 'b' refuses: .*{match}"):
        serve(tmp_path, spec(), Direct(silos)).run()


def test_a_silo_that_lost_its_memory_and_has_other_units_is_refused(tmp_path):
    silos = begun(tmp_path)
    shutil.rmtree(tmp_path / "b")
    silos["b"] = make_silos(tmp_path, ["b"], one_more)["b"]
    with pytest.raises(DeploymentError, match="'b' comes back with 6 units, it began this run with 5"):
        serve(tmp_path, spec(), Direct(silos)).run()


def test_a_silo_that_lost_its_memory_is_told_so(tmp_path):
    silos = begun(tmp_path)
    shutil.rmtree(tmp_path / "b")
    silos |= make_silos(tmp_path, ["b"])
    with pytest.raises(
        DeploymentError, match=r"Silo 'b' has no state of step \d+ \(it has none\).*restore it from a backup"
    ):
        serve(tmp_path, spec(), Direct(silos)).run()


def test_another_run_of_the_same_name(tmp_path):
    silos = begun(tmp_path)
    with pytest.raises(DeploymentError, match="begun with key 0, not 1"):
        serve(tmp_path, spec(key=1), Direct(silos)).run()
    shutil.rmtree(tmp_path / "server")
    with pytest.raises(DeploymentError, match="refuses: it knows another run of this name"):
        serve(tmp_path, spec(key=1), Direct(silos)).run()


def test_another_version_of_the_model(tmp_path):
    silos = make_silos(tmp_path)
    silos["c"].code.hash = "0" * 64
    with pytest.raises(DeploymentError, match="Silo 'c' refuses: the server has another version of the model's code"):
        serve(tmp_path, spec(), Direct(silos)).run()


@pytest.mark.parametrize(
    ("item", "value", "match"),
    [
        ("sfvi", "9.9", "another version of sfvi: '9.9' there"),
        ("precision", "float32", "another precision"),
        ("population", "x", "another population program"),
        ("spec", {"name": "run"}, "cannot be used (OptionError)"),
        ("attempt", -3, "number of attempts"),
    ],
)
def test_offers_that_do_not_fit(tmp_path, item, value, match):
    from sfvi.deploy.agreement import offer

    silo = make_silos(tmp_path, ["a"])["a"]
    fields = {**offer(spec(), code(), 0), item: value}
    found = decode(silo.handle(encode(Message("join", "run", silo.code.hash, -1, fields, {}))), limit=1 << 20)
    assert found.kind == "refused"
    assert match in found.fields["reason"]


def record(folder, **options):
    """All requests of a run."""
    silos, requests = make_silos(folder), []
    serve(folder, spec(**options), Direct(silos, before=lambda name, request: requests.append((name, request)))).run()
    return silos, requests


def test_stale_and_foreign_steps_are_refused(tmp_path):
    silos, requests = record(tmp_path, num_rounds=4)
    mine = [request for name, request in requests if name == "a"]
    rounds = [request for request in mine if decode(request, limit=1 << 26).kind == "round"]

    def ask(request):
        return decode(silos["a"].handle(request), limit=1 << 26)

    def changed(request, **changes):
        message = decode(request, limit=1 << 26)
        fields = {k: changes.pop(k) if k in changes else v for k, v in message.fields.items()}
        return encode(message._replace(fields=fields, **changes))

    assert "is over" in ask(rounds[0]).fields["reason"]
    assert "is over" in ask(rounds[-1]).fields["reason"]
    assert "has not joined" in ask(changed(rounds[-1], run="other")).fields["reason"]
    assert "another version of the model" in ask(changed(rounds[-1], model="0" * 64)).fields["reason"]
    assert "unknown" in ask(changed(rounds[-1], kind="dump")).fields["reason"]
    later = decode(rounds[-1], limit=1 << 26).step + 9
    assert "no state of step 77" in ask(changed(rounds[-1], step=later + 99, base=77)).fields["reason"]
    assert "its numbers are none" in ask(changed(rounds[-1], step=later, leg="x")).fields["reason"]
    assert "damaged" in decode(silos["a"].handle(rounds[-1][:-1] + b"x"), limit=1 << 26).fields["reason"]
    with_nan = decode(rounds[-1], limit=1 << 26)
    broken = {n: np.full_like(v, np.nan) if n.endswith("loc") else v for n, v in with_nan.arrays.items()}
    assert "NaN" in ask(changed(encode(with_nan._replace(step=later, arrays=broken)), base=4)).fields["reason"]


def test_the_same_step_twice_gives_the_same_answer(tmp_path):
    silos = make_silos(tmp_path)
    doubled = []

    def twice(name, request):
        if decode(request, limit=1 << 26).kind == "round":
            doubled.append(silos[name].handle(request) == silos[name].handle(request))

    serve(tmp_path, spec(num_rounds=4), Direct(silos, before=twice)).run()
    assert len(doubled) == 12
    assert all(doubled)


def test_a_refusal_tells_nothing_of_the_data(tmp_path, caplog):
    silos = make_silos(tmp_path)

    def fail(*_):
        raise DataError("Silo 'b': patient 4711 has 3 NaN")

    silos["b"]._join = fail
    with caplog.at_level(logging.ERROR, "sfvi"), pytest.raises(DeploymentError) as caught:
        serve(tmp_path, spec(), Direct(silos)).run()
    assert "4711" not in str(caught.value)
    assert "its own log says why" in str(caught.value)
    assert "4711" in caplog.text


def test_bad_data_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(DataError, match="2 NaN of 3"):
        Silo("a", code(), SiloInput({"y": np.array([1.0, np.nan, np.nan])}), tmp_path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"algorithm": "Adam"}, "algorithm is 'Adam'; choose SFVI, SFVIAvg, Sites"),
        ({"options": {"steps": 3}}, "SFVI has no option 'steps'"),
        ({"options": {"optimizer": 3}}, "SFVI has no option 'optimizer' that can be given as a plain value"),
        ({"algorithm": "os:path"}, "not in the model's package 'tests'"),
        ({"algorithm": "tests.deploy.small:not_options"}, "name an object like"),
        ({"algorithm": "SFVIAvg"}, "num_local_steps"),
        ({"options": {"bound": ["best", 3]}}, "bound is"),
        ({"algorithm": "tests.deploy.small:half", "min_silos": 2}, "two ways to leave silos out"),
        ({"options": {"fixed_noise": {"num_samples": 16}}, "min_silos": 2}, "need all silos in every round"),
        ({"options": {"bound": ["importance_weighted", 3]}, "min_silos": 2}, "need all silos in every round"),
    ],
)
def test_options_that_mean_nothing(tmp_path, options, match):
    with pytest.raises(OptionError, match=match):
        serve(tmp_path, spec(**options), Direct({})).run()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"name": "../x"}, "name is"),
        ({"silos": ("b", "a")}, "sorted names"),
        ({"min_silos": 4}, "there are 3 silos"),
        ({"until_converged": True}, "set disclose_elbo too"),
        ({"deadline": 0}, "deadline is 0; give seconds"),
        ({"num_rounds": 0}, "num_rounds is 0"),
        ({"key": "x"}, "key is 'x'"),
    ],
)
def test_specs_that_mean_nothing(options, match):
    with pytest.raises(OptionError, match=match):
        spec(**options)


def test_orders_are_checked():
    fine = {**Order(0, 0, -1, -1, True)._asdict(), "among": ["a"]}
    assert Order.read(Message("round", "r", "m", 0, fine, {})).among == ("a",)
    for name, value in (("mark", 1), ("base", -2), ("leg", True), ("other", 1), ("among", [1])):
        with pytest.raises(sfvi.SfviError):
            Order.read(Message("round", "r", "m", 0, {**fine, name: value}, {}))


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("join", {"fields": {"num_units": "many"}}, "cannot be used: its number of units is none"),
        ("join", {"fields": {"groups": 1}}, "what it says of its program is malformed"),
        ("begin", {"fields": {"versions": "all"}}, "the states it has are malformed"),
        ("round", {"fields": {"secret": 1.0}}, "holds something else than it should"),
        ("round", {"arrays": {"data": np.zeros(3)}}, "'data' is unknown"),
        ("round", {"run": "other"}, "answers for another run or model"),
        ("round", {"model": "0"}, "answers for another run or model"),
        ("round", None, "cannot be read: This is no message of sfvi"),
    ],
)
def test_answers_that_are_none(tmp_path, kind, change, match):
    """The server names the silo and stops; nothing is applied."""
    silos = make_silos(tmp_path)

    def forged(name, request):
        message = decode(request, limit=1 << 26)
        if name != "b" or message.kind != kind:
            return None
        if change is None:
            return b"nonsense"
        answer = decode(silos[name].handle(request), limit=1 << 26)
        parts = {k: {**getattr(answer, k), **v} if isinstance(v, dict) else v for k, v in change.items()}
        return encode(answer._replace(**parts))

    with pytest.raises(DeploymentError, match=f"'b'.*{match}"):
        serve(tmp_path, spec(num_rounds=2), Direct(silos, before=forged)).run()
