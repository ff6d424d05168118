"""A learned centring: where it goes, and its gradient."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import sfvi
from sfvi.families import BlockGaussian, StructuredLocal

from ..helpers import perturb
from ..test_enhanced_bound import setting, value_and_gradients
from .test_centring import model, simulate, with_level


@eqx.filter_jit
def gradients(elbo, one, shared, free, number):
    """In theta, for each of a number of draws."""

    def gradient(step):
        return value_and_gradients(elbo, one, shared, free, step)[1][0].theta

    return jax.lax.map(gradient, jnp.arange(number), batch_size=min(number, 500))


def only_location():
    return numpyro.sample("mu", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(("rows", "noise"), [(4, 1.0), (1, 2.0)], ids=["many rows", "few rows"])
def test_learned_number_follows_the_information_in_the_data(rows, noise):
    """Centred where the data say what each unit is, non-centred where the prior does.

    With q(b) that cannot follow mu, and b ~ N(mu, 1), the best c is known: E[b | mu, y] moves by (1 - w) mu, where w is
    the data's share of the precision of b, so b - (1 - c) mu is independent of mu if c = w.
    """

    def program(mu, data):
        with numpyro.plate("units", data["y"].shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(b[:, None], noise).to_event(1), obs=data["y"])

    algorithm = sfvi.SFVI(
        optimizer=optax.adam(optax.cosine_decay_schedule(0.05, 1500)),
        bound=sfvi.bounds.elbo(),
        local_family=sfvi.families.block(coupling="none"),
        num_samples=8,
    )
    silos = {"a": simulate(10, rows, 1, noise), "b": simulate(5, rows, 2, noise)}
    built = sfvi.StructuredModel(only_location, program, centring="learned")
    fit = sfvi.fit(built, silos, key=0, num_rounds=1500, algorithm=algorithm)
    information = rows / noise**2
    np.testing.assert_allclose(fit.theta["b_centered"], information / (information + 1.0), atol=0.03)


def test_gradient_in_a_learned_number_sticks_the_landing():
    """At the exact q(b | mu), whatever c, the gradient in c vanishes draw by draw; the plain one's does not.

    b | mu, y is N(w mean(y) + (1 - w) mu, w / information), and b~ = b - (1 - c) mu.
    """
    noise, rows = 0.5, 3

    def program(mu, data):
        with numpyro.plate("units", data["y"].shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(b[:, None], noise).to_event(1), obs=data["y"])

    built = sfvi.StructuredModel(only_location, program, centring="learned")
    data = simulate(4, rows)
    for bound in (sfvi.bounds.elbo(), sfvi.bounds.locally_enhanced(3)):
        spread = {}
        for estimator in ("stl", "reparameterization"):
            elbo, one, shared, _ = setting(built, data, bound=bound, estimator=estimator)
            information = rows / noise**2
            share, number = information / (information + 1), jax.nn.sigmoid(shared.theta["b_centered"])
            loc = share * data["y"].mean(1) + (number - share) * shared.family.center[0]
            log_scale = jnp.full((1, 4), 0.5 * np.log(share / information))
            block = BlockGaussian(loc[None], log_scale, None, jnp.full((1, 1, 4), number - share), None)
            exact = StructuredLocal(None, {"units": block})
            spread[estimator] = np.max(np.abs(gradients(elbo, one, shared, exact, 10)["b_centered"]))
        assert spread["stl"] < 1e-10
        assert spread["reparameterization"] > 0.01


@pytest.mark.parametrize("bound", [sfvi.bounds.elbo(), sfvi.bounds.locally_enhanced(3)], ids=["elbo", "enhanced"])
def test_gradient_in_learned_numbers_is_unbiased(bound):
    """Against the gradient that stops nothing, of silo latents and of units with scales: 4.5 standard errors."""
    found = {}
    for estimator in ("stl", "reparameterization"):
        options = {"bound": bound, "estimator": estimator, "init_scale": 0.5}
        elbo, one, shared, free = setting(model("learned", with_level), simulate(3), **options)
        found[estimator] = gradients(elbo, one, shared, perturb(free, 5, 0.8), 4000)
    for name in ("level_centered", "b_centered"):
        one, other = (found[estimator][name] for estimator in found)
        error = (one - other).std() / np.sqrt(4000)
        assert 0 < abs(one.mean() - other.mean()) < 4.5 * error
        assert abs(other.mean()) > 9 * error  # there is something to agree on


def test_the_importance_weighted_bound_does_not_learn():
    """Their weights would have to be those of what q is made of: the server cannot tell them from the model's own."""
    algorithm = sfvi.SFVI(bound=sfvi.bounds.importance_weighted(3))
    with pytest.raises(sfvi.OptionError, match=r"Silo 'a' learns 'level_centered'.*give centring a number"):
        sfvi.fit(model("learned", with_level), {"a": simulate(4)}, key=0, num_rounds=2, algorithm=algorithm)
