"""The normalizing flow: its density, its gradients, what it can follow, and that it goes wherever a Gaussian goes."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
from jax.scipy.special import gammaln

import sfvi
from sfvi import archive, bounds, families
from sfvi.engines import batching, loop
from sfvi.families import _couplings
from sfvi.objectives import Shared, server_term

from ..helpers import (
    assert_trees_close,
    bind,
    gamma_data,
    gamma_model,
    linear_data,
    linear_model,
    linear_posterior,
    perturb,
    run_batched,
)

SMALL = families.flow(num_layers=1, width=6, knots=4)
KEY = jax.random.key(7)


def bent(size, *, scale=0.3, build=SMALL):
    """A flow away from the identity; what networks are made of is scaled by `GAIN`, so it has to move further."""
    start = perturb(build(jnp.zeros(size), 0.5), seed=size, scale=scale)
    weights = perturb(start.weights, seed=size, scale=scale if size == 1 else scale / _couplings.GAIN)
    return eqx.tree_at(lambda f: f.weights, start, weights)


def decaying(rounds, start=0.02):
    return optax.adam(optax.cosine_decay_schedule(start, rounds))


@jax.jit
def _densities(family, noise):
    return jax.vmap(lambda e: (family.log_prob(family.sample(e)), jax.jacobian(family.sample)(e)))(noise)


def both_densities(family, noise):
    """log q(z) as `log_prob` says and by change of variables, the determinant by autodiff."""
    log_q, jacobian = _densities(family, noise)
    _, log_det = np.linalg.slogdet(jacobian)
    return log_q, scipy.stats.norm.logpdf(np.asarray(noise)).sum(1) - log_det, log_det


# The density.


@pytest.mark.parametrize(("size", "layers"), [(1, 1), (3, 2)])
def test_density_is_the_change_of_variables(size, layers):
    """log q(z) = log N(eps) - log|det dz/deps|, inside the splines and beyond."""
    family = bent(size, build=families.flow(num_layers=layers, width=6, knots=4))
    noise = jnp.asarray(np.random.default_rng(0).normal(size=(40, size)) * np.linspace(0.5, 4, 40)[:, None])
    log_q, expected, log_det = both_densities(family, noise)
    np.testing.assert_allclose(log_q, expected, rtol=1e-8, atol=1e-8)
    assert np.ptp(log_det) > 0.5  # not an affine map


def test_density_integrates_to_one():
    family = bent(1)
    grid = jnp.linspace(-60, 60, 40_001)
    density = jnp.exp(jax.jit(jax.vmap(family.log_prob))(grid[:, None]))
    np.testing.assert_allclose(density.sum() * (grid[1] - grid[0]), 1.0, rtol=1e-4)

    family = bent(2)
    draws = jax.jit(jax.vmap(family.sample))(jax.random.normal(KEY, (20_000, 2)))
    edges = [jnp.linspace(d.min() - 1, d.max() + 1, 801) for d in draws.T]
    points = jnp.stack(jnp.meshgrid(*edges), -1).reshape(-1, 2)
    density = jnp.exp(jax.jit(jax.vmap(family.log_prob))(points))
    np.testing.assert_allclose(density.sum() * np.prod([e[1] - e[0] for e in edges]), 1.0, rtol=2e-3)


def test_density_is_continuous_where_splines_end():
    """Jumps that move with the parameters would make both gradient estimators biased."""
    family = bent(1, scale=1.0)
    ends = jnp.array([[-4.0], [4.0]])
    inside, outside = (both_densities(family, ends * (1 + side))[0] for side in (-1e-9, 1e-9))
    np.testing.assert_allclose(inside, outside, atol=1e-6)


@pytest.mark.parametrize("size", [1, 4])
def test_it_starts_as_the_full_gaussian(size):
    loc = jnp.arange(1.0, size + 1)
    flow, full = families.flow()(loc, 0.3), families.full()(loc, 0.3)
    noise = jnp.linspace(-5, 5, size)[None]
    np.testing.assert_allclose(both_densities(flow, noise)[0], both_densities(full, noise)[0], rtol=1e-12)
    np.testing.assert_allclose(_densities(flow, noise)[1], _densities(full, noise)[1], atol=1e-12)
    np.testing.assert_array_equal(flow.center, loc)
    np.testing.assert_array_equal(flow.log_scale, full.log_scale)
    tilted = perturb((flow.log_scale, flow.lower), 0)
    flow, full = (eqx.tree_at(lambda f: (f.log_scale, f.lower), f, tilted) for f in (flow, full))
    for ours, exact in zip(flow.marginals(), full.marginals(), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-10)


def test_marginals_are_those_of_draws_and_always_the_same():
    family = bent(3)
    draws = np.asarray(jax.jit(jax.vmap(family.sample))(jax.random.normal(KEY, (100_000, 3))))
    mean, sd = family.marginals()
    np.testing.assert_array_less(np.abs(mean - draws.mean(0)) / draws.std(0), 4 / np.sqrt(2048))
    np.testing.assert_allclose(sd, draws.std(0), rtol=0.1)
    assert all(np.array_equal(a, b) for a, b in zip((mean, sd), family.marginals(), strict=True))


# Gradients.


def test_stl_gradient_is_unbiased():
    """Against plain reparameterization on the server's term; 4.5 standard errors, in every coordinate."""
    population = banana_model().population
    family = bent(2)

    def gradient(noise, estimator):
        def term(family):
            return server_term(population, Shared(family, {}, None), noise, estimator=estimator)

        value, found = jax.value_and_grad(term)(family)
        return value, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(found)])

    @jax.jit
    def both(noise):
        return jax.vmap(lambda e: (gradient(e, "stl"), gradient(e, "reparameterization")))(noise)

    (value, stl), (same, plain) = both(jax.random.normal(KEY, (20_000, 2)))
    np.testing.assert_allclose(value, same, rtol=1e-8)
    difference = np.asarray(stl - plain)  # on the same draws
    error = difference.std(0) / np.sqrt(len(difference))
    assert np.all(np.abs(difference.mean(0)) < 4.5 * error + 1e-10)
    assert (error > 1e-6).sum() > 50  # they are different estimators


def test_it_can_be_built_while_jax_traces():
    build = families.flow(num_layers=1, width=5, knots=3)
    traced = jax.jit(lambda loc: build(loc, 0.3).sample(jnp.ones(4)))(jnp.zeros(4))
    np.testing.assert_allclose(traced, 0.3 * jnp.ones(4), rtol=1e-12)
    family = build(jnp.zeros(4), 0.3)  # nothing that was traced is kept
    np.testing.assert_allclose(jax.jit(lambda f: f.sample(jnp.ones(4)))(family), traced, rtol=1e-12)


# What it finds.


def test_a_conjugate_posterior_is_found_and_the_elbo_is_the_evidence():
    """Not to the digits of a Gaussian family, which has fewer ways to be wrong: to 0.03 nats and 0.03 sd."""
    data, rounds = linear_data(), 3000
    silos, _ = sfvi.data.split_units(data, {"a": 7, "b": 5}, seed=0)
    options = {"global_family": SMALL, "optimizer": decaying(rounds), "bound": bounds.elbo(), "num_samples": 8}
    fit = sfvi.fit(linear_model(), silos, key=1, num_rounds=rounds, algorithm=sfvi.SFVI(**options))
    exact = linear_posterior(data)
    last = fit.elbo[-300:]
    assert -4 * last.std() / np.sqrt(len(last)) < exact.log_evidence - last.mean() < 0.03
    mean, sd = fit.posterior.family.marginals()
    exact_sd = np.sqrt(np.diag(exact.covariance))[:2]
    np.testing.assert_array_less(np.abs(mean - exact.mean[:2]) / exact_sd, 0.03)
    np.testing.assert_allclose(sd, exact_sd, rtol=0.03)


def banana_population():
    return numpyro.sample("a", dist.Normal(0.0, 1.0)), numpyro.sample("b", dist.Normal(0.0, 2.0))


def banana_silo(globals_, data):
    a, b = globals_
    with numpyro.plate("rows", data["y"].shape[0]):
        numpyro.sample("y", dist.Normal(b + a**2, 1.0), obs=data["y"])


BANANA = np.random.default_rng(0).normal(-0.5, 1.0, size=8)


def banana_on_a_grid():
    """Log evidence, means and sds by summing over a grid."""
    a, b = np.meshgrid(np.linspace(-5, 5, 601), np.linspace(-16, 8, 1201), indexing="ij")
    log_p = scipy.stats.norm.logpdf(a) + scipy.stats.norm.logpdf(b, 0, 2)
    log_p += scipy.stats.norm.logpdf(BANANA[:, None, None], b + a**2).sum(0)
    weight = np.exp(log_p - log_p.max())
    evidence = log_p.max() + np.log(weight.sum() * (a[1, 0] - a[0, 0]) * (b[0, 1] - b[0, 0]))
    weight /= weight.sum()
    mean = np.array([(weight * a).sum(), (weight * b).sum()])
    return evidence, mean, np.sqrt([(weight * a**2).sum() - mean[0] ** 2, (weight * b**2).sum() - mean[1] ** 2])


BANANAS = {"east": {"y": BANANA[:4]}, "north": {"y": BANANA[4:6]}, "west": {"y": BANANA[6:]}}


def banana_model():
    return sfvi.StructuredModel(banana_population, banana_silo)


def banana_fit(family, rounds):
    algorithm = sfvi.SFVI(global_family=family, optimizer=decaying(rounds), num_samples=8)
    fit = sfvi.fit(banana_model(), BANANAS, key=0, num_rounds=rounds, algorithm=algorithm)
    last = fit.elbo[-500:]  # at step sizes near zero: independent estimates
    return fit, last.mean(), last.std() / np.sqrt(len(last))


def test_a_banana_is_followed_where_a_gaussian_cannot():
    """The ELBO is above the Gaussian's by 20 standard errors; means and sds are those of numerical integration."""
    evidence, mean, sd = banana_on_a_grid()
    _, straight, straight_error = banana_fit(families.full(), 1500)
    fit, ours, error = banana_fit(families.flow(), 4000)
    assert ours - straight > 20 * np.hypot(error, straight_error)
    assert -4 * error < evidence - ours < 0.05
    draws = fit.posterior.sample(0, 20_000)
    joint = np.column_stack([draws["a"], draws["b"]])
    np.testing.assert_array_less(np.abs(joint.mean(0) - mean) / sd, 0.05)
    np.testing.assert_allclose(joint.std(0), sd, rtol=0.06)


def test_a_single_skewed_latent():
    """y ~ Poisson(exp z), exp z ~ Gamma: z has a log-gamma posterior and the evidence is known."""

    def population():
        return numpyro.sample("rate", dist.Gamma(1.0, 0.5))

    def silo(rate, data):
        with numpyro.plate("rows", data["y"].shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=data["y"])

    y, rounds = np.array([0, 1]), 3000
    shape, rate = 1.0 + y.sum(), 0.5 + len(y)
    evidence = jnp.log(0.5) + gammaln(shape) - shape * jnp.log(rate)
    gaps = {}
    for name, family in {"full": families.full(), "flow": families.flow(knots=8)}.items():
        algorithm = sfvi.SFVI(global_family=family, optimizer=decaying(rounds), num_samples=4)
        fit = sfvi.fit(
            sfvi.StructuredModel(population, silo), {"a": {"y": y}}, key=0, num_rounds=rounds, algorithm=algorithm
        )
        gaps[name] = float(evidence - fit.elbo[-500:].mean())
    assert gaps["full"] > 0.03
    assert abs(gaps["flow"]) < 0.25 * gaps["full"]
    draws = fit.posterior.sample(0, 20_000)["rate"]
    np.testing.assert_allclose([draws.mean(), draws.std()], [shape / rate, np.sqrt(shape) / rate], rtol=0.03)


# Wherever a Gaussian goes.


def test_any_split_gives_the_same_trajectory():
    data, found = gamma_data(12), []
    for sizes, merge in (([12], False), ([4, 4, 4], True), ([4, 4, 4], False)):
        silos, ids = sfvi.data.split_units(data, sizes, seed=len(sizes))
        algorithm, prepared, theta = bind(gamma_model(), silos, unit_ids=ids, global_family=SMALL, bound=bounds.elbo())
        server, _, batches = run_batched(gamma_model(), algorithm, prepared, theta, KEY, 200, merge=merge)
        assert [batch.stacked for batch in batches] == [not merge]
        found.append(server.shared)
    for other in found[1:]:
        assert_trees_close(other, found[0], rtol=0, atol=1e-10)
    start = SMALL(jnp.zeros(3), 0.1).weights
    moved = jax.tree.map(lambda new, old: jnp.abs(new - old).max(), found[0].family.weights, start)
    assert min(jax.tree.leaves(moved)) > 0.1


def test_rounds_are_compiled_once():
    runs = []

    def population():
        runs.append(None)
        return banana_population()

    model = sfvi.StructuredModel(population, banana_silo)
    algorithm, data, theta = bind(model, {"a": {"y": BANANA}}, global_family=SMALL)
    batches = batching.plan(model, data, theta, merge=True)
    rounds = loop.build(algorithm, batches, {name: silo.num_units for name, silo in data.items()})
    state = rounds.run(KEY, rounds.init(KEY, theta), jnp.asarray(3)).state
    before = len(runs)
    state = rounds.run(KEY, state, jnp.asarray(5)).state
    assert len(runs) == before
    first, second = (families.flow(num_layers=1, width=6, knots=4)(jnp.zeros(2), 0.1) for _ in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(second) == jax.tree.structure(state.server.shared.family)
    assert hash(jax.tree.structure(first)) == hash(jax.tree.structure(second))


SILOS = {"a": gamma_data(5, 1), "b": gamma_data(4, 2), "c": gamma_data(3, 3)}


@pytest.fixture(scope="module")
def fit():
    algorithm = sfvi.SFVI(global_family=SMALL, bound=bounds.elbo())
    return sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=50, algorithm=algorithm)


def test_a_saved_fit_comes_back_whole(fit, tmp_path):
    fit.save(tmp_path)
    loaded = sfvi.load(tmp_path, gamma_model(), SILOS)
    assert loaded.posterior.family.settings == families.FlowSettings(num_layers=1, width=6, knots=4)
    assert_trees_close(loaded.posterior.family, fit.posterior.family, rtol=0, atol=0)
    for one, two in [(fit.posterior, loaded.posterior), (fit.silo("b"), loaded.silo("b"))]:
        before, after = one.sample(KEY, 20), two.sample(KEY, 20)
        assert all(np.array_equal(before[name], after[name]) for name in before)
    alone = sfvi.GlobalPosterior.load(tmp_path / "global.npz", gamma_model())
    assert alone.summary(num_samples=50).equals(fit.posterior.summary(num_samples=50))
    again = sfvi.SiloPosterior.load(tmp_path / "silos" / "a.npz", gamma_model(), SILOS["a"])
    assert again.summary(num_samples=50).equals(fit.silo("a").summary(num_samples=50))


def test_a_file_that_does_not_fit_its_settings_is_refused(fit, tmp_path):
    fit.posterior.save(tmp_path / "global.npz")
    arrays, header = archive.read(tmp_path / "global.npz", kind="global posterior")
    header["flow"]["width"] = 7
    archive.write(tmp_path / "other.npz", arrays, header)
    with pytest.raises(sfvi.ArchiveError, match="does not fit"):
        sfvi.GlobalPosterior.load(tmp_path / "other.npz", gamma_model())


def test_draws_exports_and_new_silos(fit):
    assert fit.posterior.to_arviz(num_samples=30).posterior["beta"].shape == (1, 30, 2)
    assert repr(fit.posterior) == "<GlobalPosterior of beta, sigma: NormalizingFlow>"
    late = sfvi.fit_silo(fit.posterior, "late", gamma_data(4, 9), key=0, num_steps=20)
    assert np.all(np.isfinite(late.summary(num_samples=50)))


def test_a_resumed_run_ends_at_the_same_digits(tmp_path):
    def run(rounds, family=SMALL, **options):
        algorithm = sfvi.SFVI(global_family=family, optimizer=optax.adam(0.01))
        return sfvi.fit(banana_model(), BANANAS, key=0, num_rounds=rounds, algorithm=algorithm, **options)

    run(30, checkpoint=tmp_path / "run.npz")
    resumed = run(60, checkpoint=tmp_path / "run.npz")
    assert_trees_close(resumed.posterior.shared, run(60).posterior.shared, rtol=0, atol=0)
    with pytest.raises(sfvi.ArchiveError, match="does not fit"):
        run(70, families.flow(num_layers=2, width=6, knots=4), checkpoint=tmp_path / "run.npz")


def test_single_precision_participation_and_the_stopping_rule(float32):
    algorithm = sfvi.SFVI(global_family=SMALL, participation=sfvi.participation.fraction(0.7))
    rule = sfvi.StoppingRule(check_every=10, min_rounds=60, tolerance=1e6, drift=1e6)
    fit = sfvi.fit(banana_model(), BANANAS, key=0, num_rounds=200, algorithm=algorithm, until_converged=rule)
    assert fit.convergence.converged
    assert len(fit.elbo) < 200
    assert 0 < fit.convergence.checks[-1].drift < 10
    assert {leaf.dtype for leaf in jax.tree.leaves(fit.posterior.shared)} == {np.dtype("float32")}
    family = fit.posterior.family
    noise = jax.random.normal(KEY, (200, 2))
    log_q, expected, _ = both_densities(family, noise)
    np.testing.assert_allclose(log_q, expected, atol=1e-3)


# What it refuses.


@pytest.mark.parametrize("algorithm", ["SFVIAvg", "FastStart"])
def test_flows_are_not_averaged(algorithm):
    chosen = {
        "SFVIAvg": lambda: sfvi.SFVIAvg(global_family=SMALL, num_local_steps=5),
        "FastStart": lambda: sfvi.SFVI(global_family=SMALL, fast_start=sfvi.FastStart()),
    }[algorithm]()
    sentence = r"the family NormalizingFlow cannot be averaged; choose mean_field, .* such as SFVI\."
    with pytest.raises(sfvi.OptionError, match=sentence):
        sfvi.fit(gamma_model(), SILOS, key=0, num_rounds=1, algorithm=chosen)


@pytest.mark.parametrize("option", ["num_layers", "width", "knots"])
@pytest.mark.parametrize("value", [0, 2.5, True, "3"])
def test_options_are_checked(option, value):
    with pytest.raises(sfvi.OptionError, match=f"flow: {option} is .*; give a whole number of at least 1"):
        families.flow(**{option: value})


def test_misuse_is_answered():
    with pytest.raises(sfvi.OptionError, match=r"give what families\.full"):
        sfvi.SFVI(global_family=families.flow)
    with pytest.raises(sfvi.OptionError, match="no global latents; leave global_family out"):
        SMALL(jnp.zeros(0), 0.1)


def test_without_flowjax_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flowjax", None)
    monkeypatch.setitem(sys.modules, "flowjax.bijections", None)
    monkeypatch.delitem(sys.modules, "sfvi.families._couplings")
    monkeypatch.delattr(families, "_couplings")
    with pytest.raises(sfvi.OptionError, match=r"^flow: flowjax is not installed; run pip install 'sfvi\[flows\]'\.$"):
        families.flow()


def test_flowjax_is_imported_only_when_asked_for():
    code = "import sys, sfvi; assert not {'flowjax', 'paramax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
