"""FedSOUL and pFedBayes: their formulas, and silos that contradict each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from sfvi.baselines import FedSoul, PFedBayes, ReportedFedSoul, fed_soul, p_fed_bayes
from sfvi.baselines.networks import init_layers
from sfvi.baselines.p_fed_bayes import _kl, _mixture
from sfvi.errors import DataError, OptionError

from ..zoo.test_bayesian_networks import CLASSES, contradicting

REPORTED = ReportedFedSoul(hidden=(32, 16), num_rounds=10, num_visited=2)


def right(found, silos):
    return min(np.mean(found.predict(name, data["x"]).argmax(1) == data["y"]) for name, data in silos.items())


@pytest.mark.parametrize("settings", [REPORTED, FedSoul(gamma=1e-3, num_local_steps=60)])
def test_fed_soul_learns_what_silos_mean(settings, float32):
    silos = contradicting(500)
    found = fed_soul(silos, settings, key=0, num_classes=CLASSES)
    assert right(found, silos) > 0.85
    np.testing.assert_allclose(found.predict("a", silos["a"]["x"]).sum(1), 1.0, rtol=1e-4)


def test_langevin_draws_are_of_the_prior_where_data_say_nothing():
    r"""With step $\gamma$ and a normal prior with sd s the variance is s^2 / (1 - gamma / (2 s^2)), to 5 errors."""
    silos = {name: {"x": np.zeros((4, 3)), "y": np.zeros(4, int)} for name in "abcd"}
    settings = FedSoul(
        hidden=(40,), num_rounds=4, num_local_steps=400, left_out=0.999, gamma=0.05, step_size=1e-9, batch_size=2
    )
    found = fed_soul(silos, settings, key=0, num_classes=10)
    draws = np.asarray(found._heads["W"]).ravel()
    variance = 0.25 / (1 - 0.05 / (2 * 0.25))
    error = variance * np.sqrt(2 / len(draws))
    assert abs(draws.var() - variance) < 5 * error
    assert abs(draws.mean()) < 5 * np.sqrt(variance / len(draws))


def test_silos_that_are_never_visited_keep_the_head_they_began_with():
    many = {f"{name}{i}": data for i in range(6) for name, data in contradicting(30).items()}
    settings = dataclasses.replace(REPORTED, num_rounds=2, num_visited=3)
    found = fed_soul(many, settings, key=0, num_classes=CLASSES)
    assert sum(found.visits.values()) == 6
    never = [name for name, count in found.visits.items() if not count]
    assert len(never) >= 6
    longer = fed_soul(many, dataclasses.replace(settings, num_head_steps=20), key=0, num_classes=CLASSES)
    for position, name in enumerate(many):
        same = np.array_equal(found._heads["W"][position], longer._heads["W"][position])
        assert same == (name in never)


@pytest.mark.parametrize("exact", [True, False])
def test_p_fed_bayes_learns_what_silos_mean(exact, float32):
    silos = contradicting(300)
    settings = PFedBayes.fair() if exact else PFedBayes.reported()
    settings = dataclasses.replace(settings, shift=0.0, spread=1.0)
    found = p_fed_bayes(silos, settings, key=0, num_classes=CLASSES)
    assert right(found, silos) > 0.85


def gaussians(number, seed):
    generator = np.random.default_rng(seed)
    return {
        "loc": [{"W": jnp.asarray(generator.normal(size=(number, 2, 3)))}],
        "rho": [{"W": jnp.asarray(generator.normal(size=(number, 2, 3)))}],
    }


def test_divergence_and_the_servers_answer():
    """The divergence is NumPyro's; at the server's answer the sum of divergences is stationary and smallest."""
    many = gaussians(5, 0)
    one, other = (jax.tree.map(lambda leaf, i=i: leaf[i], many) for i in (0, 1))

    def normal(gaussian):
        return dist.Normal(gaussian["loc"][0]["W"], jax.nn.softplus(gaussian["rho"][0]["W"])).to_event(2)

    np.testing.assert_allclose(_kl(one, other), dist.kl_divergence(normal(one), normal(other)), rtol=1e-10)

    def total(shared):
        return jnp.sum(jax.vmap(_kl, (0, None))(many, shared))

    found = _mixture(many)
    for leaf in jax.tree.leaves(jax.grad(total)(found)):
        np.testing.assert_allclose(leaf, 0.0, atol=1e-9)
    assert total(found) < total(one)


def test_bad_input():
    silos = contradicting(10)
    silos["b"]["x"][0, 0] = np.nan
    with pytest.raises(DataError, match=r"p_fed_bayes: silo 'b'.*not finite"):
        p_fed_bayes(silos, PFedBayes.fair(), key=0)
    silos = contradicting(10)
    with pytest.raises(DataError, match="y of silo 'a' must be whole numbers from 0 to 1"):
        fed_soul(silos, FedSoul(), key=0, num_classes=2)
    found = p_fed_bayes(silos, PFedBayes.fair(num_rounds=1, num_local_updates=1), key=0, num_classes=CLASSES)
    with pytest.raises(OptionError, match="no silo 'zz' here; there are 'a', 'b'"):
        found.predict("zz", silos["a"]["x"])
    with pytest.raises(DataError, match="fed_soul: there are no silos"):
        fed_soul({}, FedSoul(), key=0)
    with pytest.raises(OptionError, match="left_out is 1"):
        FedSoul(left_out=1)


def test_what_they_send_is_what_they_share():
    """Counted on the arrays themselves."""
    with_biases = sum(leaf.size for leaf in jax.tree.leaves(init_layers(jax.random.key(0), [5, 32, 16], biases=True)))
    assert REPORTED.num_sent(5, 3) == 3 * with_biases  # with Adam's moments
    assert FedSoul(hidden=(7,)).num_sent(5, 3) == 5 * 7 + 2 * 7 * 3
    assert PFedBayes.fair().num_sent(5, 3) == 2 * (5 * 64 + 64 * 3)
    assert PFedBayes.reported().num_sent(5, 3) == 2 * (5 * 100 + 100 + 100 * 3 + 3)


RIVALS = {
    "FedSOUL": (fed_soul, FedSoul(gamma=3e-4, step_size=0.02, num_rounds=30, num_local_steps=40)),
    "FedSOUL, reported": (fed_soul, dataclasses.replace(REPORTED, num_rounds=30)),
    "pFedBayes": (p_fed_bayes, PFedBayes.fair(num_rounds=10, num_local_updates=60)),
    "pFedBayes, reported": (p_fed_bayes, dataclasses.replace(PFedBayes.reported(), shift=0.0, spread=1.0)),
}


@pytest.mark.parametrize("method", RIVALS)
def test_a_small_silo_learns_from_a_large_one(method, float32):
    """It predicts new rows better than alone, by two standard errors: something is exchanged, and it is of use."""
    run, settings = RIVALS[method]
    generator = np.random.default_rng(1)

    def rows(number):
        x = generator.normal(size=(number, 12)).astype(np.float32)
        return {"x": x, "y": np.abs(x[:, :CLASSES]).argmax(1)}  # linear in nothing: layers have to be learned

    silos, new = {"large": rows(2000), "small": rows(40)}, rows(1000)

    def accuracy(silos):
        return np.mean(
            run(silos, settings, key=0, num_classes=CLASSES).predict("small", new["x"]).argmax(1) == new["y"]
        )

    assert accuracy(silos) > accuracy({"small": silos["small"]}) + 2 * np.sqrt(0.5 / 1000)


def test_minibatches_stand_for_all_rows(float32):
    """What is found does not depend on how many rows are in a step: their log-likelihood is scaled up."""
    silos, probabilities = contradicting(200), []
    for size in (200, 20):
        settings = FedSoul(gamma=2e-4, num_local_steps=200, num_rounds=3, step_size=1e-9, batch_size=size)
        probabilities.append(fed_soul(silos, settings, key=0, num_classes=CLASSES).predict("a", silos["a"]["x"]))
    assert np.abs(probabilities[0] - probabilities[1]).mean() < 0.05

    def confidence(size):
        settings = PFedBayes.fair(num_rounds=5, num_local_updates=100, batch_size=size, zeta=0.1)
        found = p_fed_bayes(silos, settings, key=0, num_classes=CLASSES)
        return found.predict("a", silos["a"]["x"]).max(1).mean()

    assert abs(confidence(200) - confidence(20)) < 0.02
