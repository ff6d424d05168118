"""How much of the noise is left in a result is known before a run, and said."""

import json
import logging
import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from typer.testing import CliRunner

import sfvi
from sfvi import families, participation
from sfvi.algorithms.under_noise import SCALES, _rate, average, noise_left
from sfvi.cli import app
from sfvi.deploy import told
from sfvi.errors import DivergenceError, OptionError
from sfvi.privacy import Policy
from sfvi.run_checks import remarks_on_privacy

from ..deploy.helpers import Direct, make_silos, serve, spec
from .models import plain_silo, rows_data, two_globals
from .test_budget import PRIVATE, run

ROUNDS, KEYS = 400, 6


def normal_means():
    def population():
        return numpyro.sample("means", dist.Normal(0.0, 10.0).expand([5]).to_event(1))

    def silo(means, data):
        with numpyro.plate("people", data["y"].shape[0]):
            numpyro.sample("y", dist.Normal(means, 1.0).to_event(1), obs=data["y"])

    return sfvi.StructuredModel(population, silo)


def planned(**options):
    """What is left of the noise with three silos."""
    privacy = sfvi.UnitPrivacy(clip=0.5, noise_multiplier=4.0)
    chosen = sfvi.SFVI(**{"privacy": privacy} | options).planned(ROUNDS)
    family = (chosen.global_family or families.full())(jax.numpy.zeros(2), 0.1)
    return noise_left(chosen, family, num_silos=3, num_rounds=ROUNDS)


def test_errors_of_a_conjugate_model_are_what_was_said():
    """Its posterior is known, and hardly a unit is shortened: what is left are the noise's errors, 30 of them."""
    silos = {name: {"y": np.random.default_rng(seed).normal(0.1, 1.0, (500, 5))} for seed, name in enumerate("abc")}
    total, precision = sum(silo["y"].sum(0) for silo in silos.values()), 1500 + 0.01
    options = sfvi.SFVI(privacy=sfvi.UnitPrivacy(clip=0.5, noise_multiplier=12.0))
    model, errors = normal_means(), []
    for key in range(KEYS):
        fit = sfvi.fit(model, silos, key=key, num_rounds=ROUNDS, algorithm=options)
        errors.append((np.asarray(fit.posterior.shared.family.loc) - total / precision) * precision**0.5)
    said = fit.privacy.left
    assert said == pytest.approx(12 * 0.5 * 3**0.5 * (4 / 3) ** 0.5 / (0.6 * ROUNDS) ** 0.5)
    assert 0.6 * said < np.sqrt(np.mean(np.square(errors))) < 1.5 * said  # three standard errors of 30 errors, and more


def test_what_it_depends_on():
    """Noise, how many silos make it together, and that a part of the units is drawn."""
    alone = planned()
    assert planned(privacy=sfvi.UnitPrivacy(clip=1.0, noise_multiplier=4.0)) == pytest.approx(2 * alone)
    shared = sfvi.UnitPrivacy(clip=0.5, noise_multiplier=4.0, shared_by=3)
    assert planned(privacy=shared) == pytest.approx(alone / 3**0.5)
    few = sfvi.UnitPrivacy(clip=0.5, noise_multiplier=4.0, sampling_rate=0.25)
    assert planned(privacy=few) == pytest.approx(alone * ((16 * 12 + 3) / 12) ** 0.5)
    assert planned(global_family=families.mean_field()) == alone
    for unknown in (
        {"privacy": None},
        {"privacy": sfvi.UnitPrivacy(clip=0.5, noise_multiplier=0.0)},
        {"privacy": sfvi.SiloPrivacy(clip=0.5, noise_multiplier=4.0)},
        {"global_family": families.flow()},
        {"participation": participation.count(2)},
        {"optimizer": optax.adam(0.01)},
    ):
        assert planned(**unknown) is None


def test_the_usual_clip_is_the_rule_of_the_documentation():
    assert sfvi.UnitPrivacy.usual_clip(num_units=32_000, num_latents=5) == pytest.approx(10 * (5 / 32_000) ** 0.5)
    assert sfvi.UnitPrivacy.usual_clip(num_units=900, num_latents=4, mean_field=True) == pytest.approx(7 * 2 / 30)
    with pytest.raises(sfvi.OptionError, match="usual_clip: num_units is 0"):
        sfvi.UnitPrivacy.usual_clip(num_units=0, num_latents=5)


@pytest.mark.parametrize("noise", [30.0, 100.0])
def test_sds_arrive_where_less_than_one_is_left(noise):
    """Steps of precisions in a run add up to one over the square of what is left: to one, where that is one sd."""
    privacy, rounds = sfvi.UnitPrivacy(clip=0.5, noise_multiplier=noise), 5000
    left = average(privacy, num_silos=3, num_rounds=rounds)
    variance = 3 * (0.5 * noise) ** 2
    steps = sum(float(_rate(variance, SCALES, count, rounds)) for count in range(0, rounds, 50)) * 50
    assert steps == pytest.approx(1 / left**2, rel=0.25)


def test_a_run_that_will_tell_little_says_so_before_it_begins():
    model, silos = sfvi.StructuredModel(two_globals, plain_silo), {"a": rows_data(seed=0), "b": rows_data(seed=1)}

    def fit(noise, callback=None):
        privacy = sfvi.UnitPrivacy(clip=1.0, noise_multiplier=noise)
        return sfvi.fit(model, silos, key=0, num_rounds=20, algorithm=sfvi.SFVI(privacy=privacy), callback=callback)

    def too_early(progress):
        raise AssertionError(f"{progress} came before the warning")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            UserWarning, match=r"about 4\.7 posterior sds .* variance component may be lost.* make the noise together"
        ):
            fit(10.0, too_early)
        warnings.filterwarnings("ignore", "privacy: An epsilon of 30")
        assert "noise alone leaves an error of about 0.47 posterior sds in the means; too few" in str(fit(1.0).privacy)


def remarks(privacy, *, num_silos=3, num_rounds=20, family=None):
    chosen = sfvi.SFVI(privacy=privacy).planned(num_rounds)
    return remarks_on_privacy(chosen, family, num_silos=num_silos, num_rounds=num_rounds)


def test_an_epsilon_that_promises_nothing_is_said():
    """Asked for, or what the noise comes to."""
    (said,) = remarks(sfvi.UnitPrivacy(clip=1.0, epsilon=1e6))
    assert "promises next to nothing" in said
    (said,) = remarks(sfvi.UnitPrivacy(clip=1.0, noise_multiplier=1.0))
    assert "epsilon of 30" in said
    for fine in ({"epsilon": 19.9}, {"noise_multiplier": 0.0}, {"noise_multiplier": 3.0}):
        assert remarks(sfvi.UnitPrivacy(clip=1.0, **fine)) == []


def test_noise_for_few_whole_silos_is_said():
    private = sfvi.SiloPrivacy(clip=1.0, epsilon=2.0)
    (said,) = remarks(private, num_silos=49)
    assert "as few as 49 silos" in said
    assert remarks(private, num_silos=50) == []
    model, silos = sfvi.StructuredModel(two_globals, plain_silo), {"a": rows_data(seed=0), "b": rows_data(seed=1)}
    with pytest.warns(UserWarning, match="as few as 2 silos"):
        fit = sfvi.fit(model, silos, key=0, num_rounds=2, algorithm=sfvi.SFVI(privacy=private))
    assert str(fit.privacy) in str(fit)  # what it has cost is in what is printed of a fit
    assert str(fit).startswith("<Fit: 2 silos, 2 rounds")


@pytest.mark.parametrize(
    ("privacy", "options", "says"),
    [
        ({"protects": "unit", "epsilon": 1.0, "clip": 1.0}, {}, ["The noise is about"]),
        ({"protects": "unit", "epsilon": 1.0, "clip": 1.0}, {"min_silos": 2}, []),
        ({"protects": "unit", "epsilon": 1e6, "clip": 1.0}, {"min_silos": 2}, ["An epsilon of"]),
        ({"protects": "silo", "epsilon": 1.0, "clip": 1.0}, {}, ["Noise that hides a whole silo"]),
        (None, {}, []),
    ],
)
def test_the_operator_is_told_what_the_server_will_say(tmp_path, caplog, privacy, options, says):
    """Before a silo is asked, by the same words."""
    chosen = spec(num_rounds=4, options={"privacy": privacy} if privacy else {}, **options)
    said = told.before(chosen)
    assert len(said) == len(says)
    assert all(sentence.startswith(f"privacy: {begin}") for sentence, begin in zip(said, says, strict=True))
    with caplog.at_level(logging.WARNING, "sfvi"):
        serve(tmp_path, chosen, Direct(make_silos(tmp_path, policy=Policy()))).run()
    assert [line for line in caplog.messages if line.startswith("privacy: ")] == said


def test_the_operator_is_told_nothing_that_only_the_models_package_knows():
    assert told.before(spec(algorithm="tests.deploy.small:shared")) == []


def test_a_privacy_that_cannot_be_had_is_refused_before_anyone_is_asked():
    with pytest.raises(OptionError, match="the accountant cannot show"):
        told.before(spec(num_rounds=10_000, options={"privacy": {"protects": "unit", "epsilon": 1e-9, "clip": 1.0}}))


def test_the_command_says_it_before_the_run_and_its_cost_after(tmp_path, monkeypatch):
    """The operator stands in for a server: it fetches the result of a run that was made here."""
    fit = run(tmp_path)
    order = []

    class Fetched:
        def __init__(self, *_):
            order.append("operator")

        def run(self, output):
            fit.save(output)
            return output

    monkeypatch.setattr("sfvi.deploy.nvflare.operator.Operator", Fetched)
    monkeypatch.setattr("sfvi.cli.show.aside", lambda *said: order.extend(said))
    flags = ["run", "--kit", str(tmp_path), "--name", "x", "--rounds", "4", "--output", str(tmp_path / "x")]
    flags += [word for name in "abc" for word in ("--silo", name)]
    private = ["--option", f"privacy={json.dumps(PRIVATE)}"]
    said = CliRunner().invoke(app, [*flags, *private])
    assert said.exit_code == 0, said.output
    assert str(fit.privacy) in said.stdout.splitlines()
    assert order[0].startswith("privacy: The noise is about")
    assert order[1:] == ["operator"]
    found = json.loads(CliRunner().invoke(app, [*flags, *private, "--json"]).stdout)
    assert found["privacy"]["says"] == str(fit.privacy)
    assert found["privacy"]["epsilon"] == pytest.approx(1.0, abs=0.01)
    assert found["warnings"] == order[:1]


def test_the_cost_of_a_run_without_noise_is_json():
    private = sfvi.UnitPrivacy(clip=1.0, noise_multiplier=0.0)
    assert told.plain(sfvi.algorithms.Spent.of(private, 3))["epsilon"] is None
    assert told.plain(None) is None


def test_a_deployed_run_says_so_at_the_server(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "sfvi"):
        fit = run(tmp_path)
    assert fit.privacy.left > 1
    assert sum("privacy: The noise " in line for line in caplog.messages) == 1


def test_a_run_that_goes_on_does_not_say_it_again(tmp_path):
    model, silos = sfvi.StructuredModel(two_globals, plain_silo), {"a": rows_data(seed=0)}
    options = sfvi.SFVI(privacy=sfvi.UnitPrivacy(clip=1.0, noise_multiplier=10.0))
    said = {"key": 0, "num_rounds": 20, "algorithm": options, "checkpoint": tmp_path / "run.npz"}
    with pytest.warns(UserWarning, match=r"privacy: The noise .* or have more of them: with more units"):
        sfvi.fit(model, silos, **said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sfvi.fit(model, silos, **said)


def test_a_private_run_that_breaks_at_once_says_where():
    """Nothing was averaged, so nothing is said of what is left."""

    def population():
        line = two_globals()
        numpyro.factor("root", jax.numpy.sqrt(line[0] - 50.0))
        return line

    options = sfvi.SFVI(privacy=sfvi.UnitPrivacy(clip=1.0, noise_multiplier=10.0))
    with pytest.raises(DivergenceError, match="Round 0 broke") as caught:
        sfvi.fit(sfvi.StructuredModel(population, plain_silo), {"a": rows_data()}, key=0, algorithm=options)
    assert caught.value.fit.privacy.left is None
