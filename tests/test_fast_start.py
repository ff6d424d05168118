"""A fast start: rounds of SFVI-Avg, then SFVI from there."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import sfvi
from sfvi import families, stages
from sfvi.data import six_cities, split_units
from sfvi.engines import batching, loop
from sfvi.zoo import logistic_mixed_model

from .helpers import assert_trees_close, bind, linear_data, linear_model

SILOS = {"a": linear_data(5), "b": linear_data(6, seed=1), "c": linear_data(6, seed=2)}
START = sfvi.FastStart(rounds=3, num_local_steps=10)


def test_sfvi_goes_on_where_sfvi_avg_ended():
    """Parameters pass over exactly, from stacked and padded silos to merged ones; a step size of zero shows it."""
    still = optax.sgd(0.0)
    algorithm = sfvi.SFVI(fast_start=START, optimizer=optax.adam(0.05), local_optimizer=optax.adam(0.05))
    first = sfvi.SFVIAvg(num_local_steps=10, refit_steps=0, optimizer=optax.adam(0.05))
    (options, rounds), (main, _) = algorithm.stages()
    assert (options.num_local_steps, rounds, main.fast_start) == (10, 3, None)
    key = jax.random.key(0)
    before = sfvi.fit(linear_model(), SILOS, key=key, num_rounds=3, algorithm=first)
    model = linear_model()
    bound, data, theta = bind(model, SILOS, optimizer=still)
    for merge in (True, False):
        batches = batching.plan(model, data, theta, merge=merge)
        rounds = loop.build(bound, batches, {name: silo.num_units for name, silo in data.items()})
        free = {name: before.silo(name).free for name in SILOS}
        state = rounds.adopt(
            key, before.posterior.shared, tuple(batching.batch_family(batch, free) for batch in batches)
        )
        found = {}
        for batch, silo in zip(batches, state.silos, strict=True):
            found |= batching.local_families(batch, silo.family)
        assert_trees_close((state.server.shared, found), (before.posterior.shared, free), rtol=0, atol=0)


def test_both_stages_are_in_the_result(tmp_path):
    fit = sfvi.fit(linear_model(), SILOS, key=0, num_rounds=20, algorithm=sfvi.SFVI(fast_start=START))
    assert len(fit.elbo) == 23
    assert fit.participation.shape == (23, 3)
    assert np.isfinite(fit.trace["barycenter_residual"]).sum() == 3
    fit.save(tmp_path)
    np.testing.assert_array_equal(sfvi.load(tmp_path, linear_model(), SILOS).elbo, fit.elbo)


def test_resumes_in_either_stage(tmp_path):
    class StopError(Exception):
        pass

    def run(path=None, stop_after=None):
        seen = []

        def watch(progress):
            seen.append(progress)
            if stop_after is not None and len(seen) >= stop_after:
                raise StopError

        algorithm = sfvi.SFVI(fast_start=START)
        return sfvi.fit(
            linear_model(), SILOS, key=0, num_rounds=30, algorithm=algorithm, checkpoint=path, callback=watch
        )

    whole = run()
    for stop_after in (2, 4):
        path = tmp_path / f"run{stop_after}.npz"
        with pytest.raises(StopError):
            run(path, stop_after)
        again = run(path)
        np.testing.assert_array_equal(again.elbo, whole.elbo)
        assert_trees_close(again.posterior.family, whole.posterior.family, rtol=0, atol=0)


def test_the_main_stage_begins_with_the_local_families_of_the_fast_start():
    """The first step of Adam moves no parameter by more than its size: nothing was started anew in between."""
    optimizer = optax.adam(0.05)
    algorithm = sfvi.SFVI(fast_start=START, optimizer=optimizer)
    fit = sfvi.fit(linear_model(), SILOS, key=0, num_rounds=1, algorithm=algorithm)
    first = sfvi.SFVIAvg(num_local_steps=10, refit_steps=0, optimizer=optimizer)
    key = jax.random.fold_in(jax.random.key(0), stages.STREAM)
    before = sfvi.fit(linear_model(), SILOS, key=key, num_rounds=3, algorithm=first)
    for name in SILOS:
        for old, new in zip(*(jax.tree.leaves(f.silo(name).free) for f in (before, fit)), strict=True):
            np.testing.assert_allclose(new, old, atol=0.0501)
    assert all(np.abs(before.silo(name).free.units["units"].loc).max() > 0.3 for name in SILOS)


def by_size(data):
    """Inputs that treat units by themselves in any one silo, but not where silos are merged."""
    return data["y"] / data["y"].shape[0]


def test_what_the_second_stage_would_refuse_is_refused_before_the_first(tmp_path):
    calls, path = [], tmp_path / "run.npz"

    def run(checkpoint, num_rounds=5, **options):
        options = {"fast_start": START, "optimizer": optax.adam(0.01)} | options
        sfvi.fit(
            linear_model(),
            {"a": linear_data(5), "b": linear_data(5, seed=1)},
            key=0,
            num_rounds=num_rounds,
            algorithm=sfvi.SFVI(**options),
            checkpoint=checkpoint,
            callback=calls.append,
        )

    run(path, fast_start=None)
    calls.clear()
    (tmp_path / "folder").mkdir()
    network = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    for checkpoint, options, error, words in [
        (tmp_path / "folder", {}, sfvi.OptionError, "cannot be written"),
        (path, {}, sfvi.ArchiveError, "another algorithm"),
        (tmp_path / "new.npz", {"local_family": families.amortized(network, by_size)}, sfvi.OptionError, "by itself"),
    ]:
        with pytest.raises(error, match=words):
            run(checkpoint, **options)
        assert not calls
        assert not list(tmp_path.glob("*.start0"))
    run(tmp_path / "again.npz")
    calls.clear()
    (tmp_path / "again.npz.start0").unlink()
    with pytest.raises(sfvi.OptionError, match="has 5 rounds already"):
        run(tmp_path / "again.npz", num_rounds=4)
    assert not calls
    assert not list(tmp_path.glob("*.start0"))


def test_cuts_the_steps_to_a_given_elbo():
    """Six cities: rounds until the ELBO, smoothed, comes within two nats of its optimum."""
    silos, _ = split_units(six_cities(), [300, 237], seed=1)

    def rounds_needed(algorithm):
        fit = sfvi.fit(logistic_mixed_model(), silos, key=0, num_rounds=3000, algorithm=algorithm)
        smooth = np.convolve(fit.elbo, np.ones(20) / 20, "valid")
        return int(np.argmax(smooth > -830.0)) + 20

    plain = rounds_needed(sfvi.SFVI())
    fast = rounds_needed(sfvi.SFVI(fast_start=sfvi.FastStart(rounds=10, num_local_steps=100)))
    assert fast < plain / 2


def test_bad_options():
    for make, words in [
        (lambda: sfvi.SFVI(fast_start=5), "fast_start is 5"),
        (lambda: sfvi.FastStart(rounds=0), "rounds is 0"),
        (lambda: sfvi.FastStart(num_local_steps=0), "num_local_steps is 0"),
        (lambda: sfvi.FastStart(weights="n"), "weights is 'n'"),
    ]:
        with pytest.raises(sfvi.OptionError, match=words):
            make()
