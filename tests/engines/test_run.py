"""Driving a run: reproducible, compiled once, resumable after SIGKILL, clear when it breaks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import sfvi
from sfvi.algorithms import sfvi as sfvi_module

from ..helpers import assert_trees_close, gamma_data, gamma_model

SILOS = {"a": gamma_data(6, seed=1), "b": gamma_data(5, seed=2)}


def states(fit):
    return *fit.posterior.shared, [fit.silo(n).family for n in fit.silo_names]


def exactly_equal(one, other):
    assert_trees_close(states(one), states(other), rtol=0, atol=0)
    np.testing.assert_array_equal(one.elbo, other.elbo)


def test_same_key_same_bits_and_another_key_others():
    one, two, other = (sfvi.fit(gamma_model(), SILOS, key=k, num_rounds=50) for k in (3, 3, 4))
    exactly_equal(one, two)
    assert not np.array_equal(one.elbo, other.elbo)


def test_order_of_silos_does_not_matter():
    one = sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=50)
    two = sfvi.fit(gamma_model(), dict(reversed(SILOS.items())), key=0, num_rounds=50)
    exactly_equal(one, two)


@pytest.mark.filterwarnings("ignore:Not converged")
def test_each_step_is_traced_once(monkeypatch):
    """However many rounds and calls of the compiled loop: one trace."""
    traces = []
    honest = sfvi_module.BoundSFVI.silo_step

    def counted(self, *args):
        traces.append(1)
        return honest(self, *args)

    monkeypatch.setattr(sfvi_module.BoundSFVI, "silo_step", counted)
    calls = []
    sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=5)
    once = len(traces)
    sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=3777, until_converged=True, callback=calls.append)
    assert len(calls) > 3
    assert len(traces) == 2 * once


def test_progress_is_reported_and_silent_off_the_terminal(capfd):
    seen = []
    sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=500, callback=seen.append)
    assert seen[-1].round == seen[-1].num_rounds == 500
    assert seen[-1].rounds_per_second > 0
    assert seen[-1].seconds_left == 0
    assert [p.round for p in seen] == sorted({p.round for p in seen})
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_run_that_did_not_converge_says_so():
    with pytest.warns(UserWarning, match="Not converged after 1500 rounds.*Raise num_rounds"):
        fit = sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=1500, until_converged=True)
    assert "Not converged" in repr(fit)


def test_single_precision_runs_everywhere(float32):
    fit = sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=100)
    floats = [leaf for leaf in jax.tree.leaves(states(fit)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}


class TestCheckpoint:
    def test_a_longer_run_continues_to_the_same_digits(self, tmp_path):
        file = tmp_path / "run.npz"
        run = {"key": 0, "algorithm": sfvi.SFVI(optimizer=optax.adam(0.01))}
        sfvi.fit(gamma_model(), SILOS, num_rounds=40, checkpoint=file, **run)
        continued = sfvi.fit(gamma_model(), SILOS, num_rounds=100, checkpoint=file, **run)
        exactly_equal(continued, sfvi.fit(gamma_model(), SILOS, num_rounds=100, **run))

    def test_fewer_rounds_than_were_done_are_refused(self, tmp_path):
        algorithm = sfvi.SFVI(optimizer=optax.adam(0.01))
        run = {"silos": SILOS, "key": 0, "checkpoint": tmp_path / "run.npz", "algorithm": algorithm}
        sfvi.fit(gamma_model(), num_rounds=12, **run)
        with pytest.raises(sfvi.OptionError, match=r"num_rounds is 5, but the checkpoint .* has 12 rounds"):
            sfvi.fit(gamma_model(), num_rounds=5, **run)

    def test_an_interrupted_run_is_saved(self, tmp_path):
        file = tmp_path / "run.npz"

        def interrupt(progress):
            if progress.round > 100:
                raise KeyboardInterrupt

        run = {"key": 0, "checkpoint": file, "algorithm": sfvi.SFVI(optimizer=optax.adam(0.01))}
        with pytest.raises(KeyboardInterrupt):
            sfvi.fit(gamma_model(), SILOS, num_rounds=100_000, callback=interrupt, **run)
        first = []
        sfvi.fit(gamma_model(), SILOS, num_rounds=100_000 // 10, callback=first.append, **run)
        assert first[0].round > 100

    def test_another_family_to_start_from_is_refused(self):
        mean_field = sfvi.SFVI(global_family=sfvi.families.mean_field())
        first = sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=2, algorithm=mean_field)
        with pytest.raises(sfvi.OptionError, match=r"start has a MeanFieldGaussian .* a FullGaussian"):
            sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=2, start=first)

    def test_other_steps_are_refused(self, tmp_path):
        """By default the step size falls to zero in the last round: another number of rounds is another run."""
        run = {"silos": SILOS, "key": 0, "checkpoint": tmp_path / "run.npz"}
        sfvi.fit(gamma_model(), num_rounds=5, **run)
        with pytest.raises(sfvi.ArchiveError, match=r"another num_rounds \(the default step size falls with it\)"):
            sfvi.fit(gamma_model(), num_rounds=12, **run)

    @pytest.mark.filterwarnings("ignore:No check was made")
    def test_the_stopping_rule_resumes_with_its_evidence(self, tmp_path):
        rule = sfvi.StoppingRule(check_every=50, min_rounds=300, drift=1.0, tolerance=10.0, patience=2)
        whole = sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=3000, until_converged=rule)
        file = tmp_path / "run.npz"
        sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=170, until_converged=rule, checkpoint=file)
        resumed = sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=3000, until_converged=rule, checkpoint=file)
        exactly_equal(whole, resumed)
        assert whole.convergence == resumed.convergence
        assert whole.convergence.converged

    @pytest.mark.parametrize(
        ("change", "item"),
        [
            ({"key": 1}, "key"),
            ({"silos": {"a": SILOS["a"], "b": gamma_data(5, seed=3)}}, "data set"),
            ({"silos": {"a": SILOS["a"], "c": SILOS["b"]}}, "set of silos"),
        ],
    )
    def test_another_run_is_refused(self, tmp_path, change, item):
        file = tmp_path / "run.npz"
        run = {"silos": SILOS, "key": 0, "num_rounds": 5, "checkpoint": file}
        sfvi.fit(gamma_model(), **run)
        before = file.read_bytes()
        with pytest.raises(sfvi.ArchiveError, match=f"another {item}"):
            sfvi.fit(gamma_model(), **(run | change))
        assert file.read_bytes() == before

    def test_another_model_or_family_is_refused(self, tmp_path):
        file = tmp_path / "run.npz"
        sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=5, checkpoint=file)

        def population():
            scale = numpyro.param("scale", 1.5, constraint=dist.constraints.positive)
            beta = numpyro.sample("beta", dist.Normal(0.1, scale).expand([2]).to_event(1))
            return beta, numpyro.sample("sigma", dist.HalfNormal(2.0))

        from ..helpers import gamma_silo

        with pytest.raises(sfvi.ArchiveError, match="another model"):
            sfvi.fit(sfvi.StructuredModel(population, gamma_silo), SILOS, key=0, num_rounds=5, checkpoint=file)
        mean_field = sfvi.SFVI(global_family=sfvi.families.mean_field())
        with pytest.raises(
            sfvi.ArchiveError,
            match=r"another model, data, family or optimizer|does not fit|another algorithm or option",
        ):
            sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=9, checkpoint=file, algorithm=mean_field)

    def test_a_damaged_file_is_refused(self, tmp_path):
        file = tmp_path / "run.npz"
        sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=5, checkpoint=file)
        whole = file.read_bytes()
        for broken in (whole[: len(whole) // 2], b"", whole[:200] + b"\xff" * 50 + whole[250:]):
            file.write_bytes(broken)
            with pytest.raises(sfvi.ArchiveError, match="damaged"):
                sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=5, checkpoint=file)


SCRIPT = """
import sys
import jax
jax.config.update("jax_enable_x64", True)
import sfvi
from tests.helpers import gamma_data, gamma_model
silos = {"a": gamma_data(6, seed=1), "b": gamma_data(5, seed=2)}
report = lambda progress: print(progress.round, flush=True)
run = {"checkpoint": sys.argv[1], "checkpoint_every": 0, "callback": report}
fit = sfvi.fit(gamma_model(), silos, key=0, num_rounds=60_000, **run)
fit.save(sys.argv[2])
"""


def test_killed_at_any_moment_it_continues_to_the_same_digits(tmp_path):
    """SIGKILL at random moments of a run in another process, then compare with an undisturbed run."""
    checkpoint, result = tmp_path / "run.npz", tmp_path / "fit"
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), str(result)]
    root = Path(__file__).parents[2]
    generator = np.random.default_rng(0)
    killed_at = []
    for _ in range(3):
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        last = process.stdout.readline()
        time.sleep(generator.uniform(0.0, 1.0))
        os.kill(process.pid, signal.SIGKILL)
        rest = process.communicate()[0].splitlines()
        killed_at.append(int((rest or [last])[-1]))
        assert not result.exists()
    assert killed_at == sorted(killed_at)
    assert 0 < killed_at[0] < killed_at[-1] < 60_000
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
    resumed = sfvi.load(result, gamma_model(), SILOS)
    exactly_equal(resumed, sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=60_000))
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == []


class TestDivergence:
    @staticmethod
    def population():
        return numpyro.sample("mu", dist.Normal(0.0, 1.0))

    def fit(self, silo, **options):
        silos = {"good": {"y": np.ones(3)}, "bad": {"y": np.array([1.0, 1.0, 3.0])}}
        algorithm = sfvi.SFVI(optimizer=options.pop("optimizer", optax.adam(0.05)))
        model = sfvi.StructuredModel(self.population, silo)
        return sfvi.fit(model, silos, key=0, num_rounds=3000, algorithm=algorithm, **options)

    def test_nan_names_round_silo_and_site_and_keeps_the_last_good_state(self, tmp_path):
        def silo(mu, data):
            with numpyro.plate("units", 3):
                b = numpyro.sample("b", dist.Normal(mu, 1.0))
                # the third unit of the bad silo drives b up until the square root has no value
                numpyro.sample("y", dist.Normal(b + 0 * jnp.sqrt(2.0 - b), 0.05), obs=data["y"])

        with pytest.raises(sfvi.DivergenceError, match=r"Round \d+ broke in silo 'bad' at site 'y'") as caught:
            self.fit(silo, checkpoint=tmp_path / "run.npz")
        error = caught.value
        assert (error.silo, error.site) == ("bad", "y")
        assert len(error.fit.elbo) == error.round > 3
        assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(states(error.fit)))
        again = sfvi.archive.read(tmp_path / "run.npz", kind="checkpoint")[0]
        assert all(np.all(np.isfinite(a)) for a in again.values() if a.dtype.kind == "f")

    def test_a_gradient_that_is_not_finite(self):
        def silo(mu, data):
            with numpyro.plate("units", 3):
                b = numpyro.sample("b", dist.Normal(mu, 1.0))
                # value 0, gradient NaN, once b exceeds 2
                kink = jnp.where(b > 2.0, jnp.sqrt(jnp.maximum(2.0 - b, 0.0)), 0.0)
                numpyro.sample("y", dist.Normal(b + kink, 0.05), obs=data["y"])

        with pytest.raises(sfvi.DivergenceError, match="gradient") as caught:
            self.fit(silo)
        assert caught.value.silo == "bad"
        assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(states(caught.value.fit)))

    def test_a_runaway_elbo(self):
        def silo(mu, data):
            with numpyro.plate("units", 3):
                b = numpyro.sample("b", dist.Normal(mu, 1.0))
                numpyro.sample("y", dist.Normal(b, 0.5), obs=data["y"])

        with pytest.raises(sfvi.DivergenceError, match="lower the step size"):
            self.fit(silo, optimizer=optax.sgd(3.0))

    def test_the_server_is_named_when_the_prior_breaks(self):
        def population():
            mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
            numpyro.factor("wall", 0 * jnp.sqrt(0.8 - mu))
            return mu

        def silo(mu, data):
            numpyro.sample("y", dist.Normal(mu, 0.3).expand([3]).to_event(1), obs=data["y"])

        model = sfvi.StructuredModel(population, silo)
        with pytest.raises(sfvi.DivergenceError, match="at the server at site 'wall'"):
            sfvi.fit(model, {"a": {"y": np.full(3, 2.0)}}, key=0, num_rounds=3000)
