"""Networks whose silos differ: the paper's formulas, and silos that contradict each other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.scipy.stats import norm
from numpyro.infer.util import log_density

import sfvi
from sfvi import zoo

FEATURES, CLASSES = 6, 3
OPTIONS = zoo.families_for_networks()


def contradicting(rows=120):
    """The same inputs mean different classes in the two silos."""
    generator = np.random.default_rng(0)
    silos = {}
    for shift, name in enumerate(("a", "b")):
        x = generator.normal(size=(rows, FEATURES)).astype(np.float32)
        silos[name] = {"x": x, "y": (x[:, :CLASSES].argmax(1) + shift) % CLASSES}
    return silos


def values_of(shapes):
    generator = np.random.default_rng(1)
    return {name: generator.normal(size=shape) for name, shape in shapes.items()}


def likelihood(layers, data):
    hidden = data["x"].astype(float)
    for layer in layers[:-1]:
        hidden = np.maximum(hidden @ layer, 0)
    scores = hidden @ layers[-1]
    scores -= np.log(np.exp(scores).sum(1, keepdims=True))
    return scores[np.arange(len(scores)), data["y"]].sum()


def joint(model, data, values):
    """Log density of all sites at values in the model's own space."""
    return float(log_density(model.as_one_program({"a": data}), (), {}, values)[0])


@pytest.mark.parametrize("scale", ["scalar", "elementwise"])
def test_the_hierarchical_network_is_the_papers(scale):
    data = contradicting(20)["a"]
    model = zoo.hierarchical_bnn(num_features=FEATURES, num_classes=CLASSES, width=4, personal=(5,), scale=scale)
    shape = () if scale == "scalar" else (FEATURES, 4)
    shapes = {"mu": (FEATURES, 4), "sigma": shape, "a/epsilon": (FEATURES, 4), "a/W2": (4, 5), "a/W3": (5, CLASSES)}
    z = values_of(shapes)
    z["sigma"] = np.abs(z["sigma"])
    expected = sum(norm.logpdf(value).sum() for value in z.values()) + z["sigma"].size * np.log(2)
    layers = [z["mu"] + z["sigma"] * z["a/epsilon"], z["a/W2"], z["a/W3"]]
    np.testing.assert_allclose(joint(model, data, z), expected + likelihood(layers, data), rtol=1e-10)


@pytest.mark.parametrize("power", [1.0, 10.0])
def test_fed_pop_in_full(power):
    data = contradicting(20)["a"]
    model = zoo.fed_pop(num_features=FEATURES, num_classes=CLASSES, hidden=(5, 4), power=power)
    head = (4, CLASSES)
    z = values_of({"W1": (FEATURES, 5), "W2": (5, 4), "mu": head, "sigma": head, "a/head": head})
    z["sigma"] = np.abs(z["sigma"])
    expected = sum(norm.logpdf(z[name]).sum() for name in ("W1", "W2", "mu", "sigma")) + z["sigma"].size * np.log(2)
    expected += norm.logpdf(z["a/head"], z["mu"], z["sigma"]).sum()
    layers = [z["W1"], z["W2"], z["a/head"]]
    np.testing.assert_allclose(joint(model, data, z), expected + power * likelihood(layers, data), rtol=1e-10)


@pytest.mark.parametrize("make", [zoo.hierarchical_bnn, zoo.fed_pop])
@pytest.mark.parametrize(
    "algorithm",
    [
        sfvi.SFVI(**OPTIONS),
        sfvi.SFVIAvg(num_local_steps=5, refit_steps=5, optimizer=optax.adam(0.01), **OPTIONS),
        sfvi.Sites(num_local_steps=5, **OPTIONS),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_a_power_is_a_number_of_copies_of_every_row(make, algorithm):
    """Nothing but the likelihood is multiplied: neither the priors of silos' own latents nor the server's term."""
    silos = contradicting(20)
    copies = {name: {part: np.concatenate([rows] * 3) for part, rows in data.items()} for name, data in silos.items()}
    sizes = {"num_features": FEATURES, "num_classes": CLASSES}
    found = [
        sfvi.fit(make(power=power, **sizes), data, key=0, num_rounds=3, algorithm=algorithm)
        for power, data in ((3.0, silos), (1.0, copies), (1.0, silos))
    ]
    states = [jax.tree.leaves((fit.posterior.family, *(fit.silo(name).family for name in silos))) for fit in found]
    for cold, copied in zip(*states[:2], strict=True):
        np.testing.assert_allclose(cold, copied, atol=1e-10)
    np.testing.assert_allclose(found[0].elbo, found[1].elbo, rtol=1e-10)
    assert max(np.abs(cold - plain).max() for cold, plain in zip(states[0], states[2], strict=True)) > 1e-4


def test_the_power_of_a_likelihood_with_minibatches():
    """Of the same rows: a step's gradient is linear in it."""
    data = contradicting(20)["a"]
    means = []
    for power in (1.0, 2.0, 3.0):
        model = zoo.fed_pop(num_features=FEATURES, num_classes=CLASSES, hidden=(4,), batch_size=7, power=power)
        fit = sfvi.fit(
            model, {"a": data}, key=0, num_rounds=1, algorithm=sfvi.SFVI(optimizer=optax.sgd(1e-3), **OPTIONS)
        )
        means.append(np.asarray(fit.posterior.shared.family.loc))
    np.testing.assert_allclose(means[2] - means[1], means[1] - means[0], atol=1e-12)
    assert np.abs(means[1] - means[0]).max() > 1e-6


@pytest.mark.parametrize("power", [0, -1.0, float("nan"), "2", True])
def test_powers_that_are_none(power):
    for make in (zoo.fed_pop, zoo.hierarchical_bnn):
        with pytest.raises(sfvi.OptionError, match="power is"):
            make(power=power)


def test_powers_of_other_kinds():
    assert zoo.fed_pop(power=np.float32(10)) is not None
    assert zoo.fed_pop(power=np.int64(10)) is not None


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (zoo.hierarchical_bnn, {"width": 0}, "hierarchical_bnn: width is 0; give a whole number of at least 1"),
        (zoo.hierarchical_bnn, {"width": True}, "width is True"),
        (zoo.hierarchical_bnn, {"personal": (0,)}, r"personal\[0\] is 0"),
        (zoo.hierarchical_bnn, {"personal": {"a": (3, "b")}}, r"personal\['a'\]\[1\] is 'b'"),
        (zoo.hierarchical_bnn, {"personal": {}}, "personal names no silo"),
        (zoo.hierarchical_bnn, {"personal": 8}, "personal is 8; give a sequence of widths"),
        (zoo.fed_pop, {"hidden": ()}, "hidden is .*; give a sequence of widths, at least 1, like"),
        (zoo.fed_pop, {"hidden": 8}, "hidden is 8"),
        (zoo.fed_pop, {"hidden": (8, -1)}, r"hidden\[1\] is -1"),
        (zoo.fed_pop, {"batch_size": 2.5}, "fed_pop: batch_size is 2.5"),
        (zoo.fed_pop, {"num_classes": 0}, "num_classes is 0"),
        (zoo.multinomial_regression, {"num_features": -1}, "multinomial_regression: num_features is -1"),
    ],
)
def test_sizes_that_are_none(make, options, says):
    with pytest.raises(sfvi.OptionError, match=says):
        make(**options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y": lambda y: y[:, None]}, r"silo 'b'.*y has the shape \(20, 1\).*give a class for each of 20 rows"),
        ({"y": lambda y: y[:7]}, r"y has the shape \(7,\)"),
        ({"y": lambda y: y.astype(float)}, "the type float"),
        ({"x": lambda x: x[:, :-1]}, r"silo 'b'.*x has the shape \(20, 5\); give a row of num_features = 6 numbers"),
        ({"x": lambda x: x.reshape(20, 2, 3)}, "num_features = 6"),
    ],
)
@pytest.mark.parametrize("make", [zoo.fed_pop, zoo.hierarchical_bnn, zoo.multinomial_regression])
def test_data_of_wrong_shapes_are_refused(make, change, says):
    """Not fitted to whatever they broadcast to."""
    silos = contradicting(20)
    silos["b"] |= {part: how(silos["b"][part]) for part, how in change.items()}
    model = make(num_features=FEATURES, num_classes=CLASSES, batch_size=10)
    with pytest.raises(sfvi.DataError, match=says):
        sfvi.fit(model, silos, key=0, num_rounds=1)


def right(fit, silos):
    found = {name: fit.silo(name).predict(data, num_samples=50)["probabilities"] for name, data in silos.items()}
    return {name: np.mean(found[name].argmax(1) == data["y"]) for name, data in silos.items()}


@pytest.mark.parametrize("make", [zoo.hierarchical_bnn, zoo.fed_pop])
def test_silos_that_contradict_each_other_are_both_right(make, float32):
    silos = contradicting()
    model = make(num_features=FEATURES, num_classes=CLASSES, batch_size=40)
    algorithm = sfvi.SFVI(optimizer=optax.adam(0.02), **OPTIONS)
    fit = sfvi.fit(model, silos, key=0, num_rounds=600, algorithm=algorithm)
    assert min(right(fit, silos).values()) > 0.85  # one network for both: below 0.5
    assert fit.posterior.family.center.dtype == jnp.float32


def test_silos_may_have_different_networks():
    silos = contradicting()
    personal = {"a": (), "b": (7, 5)}
    model = zoo.hierarchical_bnn(num_features=FEATURES, num_classes=CLASSES, width=16, personal=personal)
    algorithm = sfvi.SFVI(optimizer=optax.adam(0.02), **OPTIONS)
    fit = sfvi.fit(model, silos, key=0, num_rounds=600, algorithm=algorithm)
    assert min(right(fit, silos).values()) > 0.85
    assert fit.silo("a").sample(0, 2)["W2"].shape == (2, 16, CLASSES)
    assert fit.silo("b").sample(0, 2)["W4"].shape == (2, 5, CLASSES)


def test_silos_begin_where_the_strategy_says():
    """Each silo's own latents too, every silo's elsewhere; by default at zero."""
    silos = contradicting()
    model = zoo.fed_pop(num_features=FEATURES, num_classes=CLASSES, hidden=(4,))
    still = optax.sgd(0.0)
    fits = [
        sfvi.fit(model, silos, key=0, num_rounds=1, algorithm=algorithm)
        for algorithm in (
            sfvi.SFVI(optimizer=still, **OPTIONS),
            sfvi.SFVIAvg(num_local_steps=1, refit_steps=0, optimizer=still, **OPTIONS),
            sfvi.SFVI(optimizer=still),
        )
    ]
    random, again, zero = ({name: np.asarray(fit.silo(name).family.silo.loc) for name in silos} for fit in fits)
    assert not np.array_equal(random["a"], random["b"])
    assert 0.03 < np.abs(random["a"]).mean() < 0.1
    assert np.array_equal(random["a"], again["a"])
    assert not zero["a"].any()
    joined = sfvi.fit_silo(
        fits[0].posterior,
        "c",
        silos["a"],
        key=1,
        num_steps=1,
        optimizer=still,
        **{"init_loc_fn": OPTIONS["init_loc_fn"]},
    )
    assert np.asarray(joined.family.silo.loc).any()


def test_sites_that_are_not_as_written_start_at_their_location_and_new_silos_where_the_strategy_says():
    silos = contradicting(20)
    made = zoo.fed_pop(num_features=FEATURES, num_classes=CLASSES, hidden=(4,))
    still, strategy = optax.sgd(0.0), OPTIONS["init_loc_fn"]
    algorithm = sfvi.SFVI(optimizer=still, init_loc_fn=strategy)
    centred = sfvi.StructuredModel(made.population.program, made.silo_program, centring="non_centred")
    fit = sfvi.fit(centred, silos, key=0, num_rounds=1, algorithm=algorithm)
    assert not np.asarray(fit.silo("a").family.silo.loc).any()
    first = sfvi.fit(made, {"a": silos["a"]}, key=0, num_rounds=1, algorithm=algorithm)
    warm = sfvi.fit(made, silos, key=0, num_rounds=1, algorithm=algorithm, start=first)
    assert np.asarray(warm.silo("b").family.silo.loc).any()


def test_unknown_scales_are_refused():
    with pytest.raises(sfvi.OptionError, match="'scalar' or 'elementwise'"):
        zoo.hierarchical_bnn(scale="both")
