"""Every wrong input gets one sentence that names the site, silo or option, before any round has run."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import sfvi

GOOD = {"y": np.ones(3)}


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 1.0))


def silo(mu, data):
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(b, 1.0), obs=data["y"])


def fit(population=population, silo=silo, silos=None, **options):
    silos = {"north": GOOD} if silos is None else silos
    rounds = []
    model = sfvi.StructuredModel(population, silo)
    try:
        return sfvi.fit(model, silos, **{"key": 0, "num_rounds": 5, "callback": rounds.append, **options})
    finally:
        assert not rounds, "a round ran before the complaint"


def discrete(mu, data):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(mu + k, 1.0).expand([3]).to_event(1), obs=data["y"])


def same_site(mu, data):
    numpyro.sample("mu", dist.Normal(mu, 1.0))
    numpyro.sample("y", dist.Normal(mu, 1.0).expand([3]).to_event(1), obs=data["y"])


def unpacks_two(globals_, data):
    beta, omega = globals_
    numpyro.sample("y", dist.Normal(beta, omega), obs=data["y"])


def observes_nothing(mu, data):
    numpyro.sample("b", dist.Normal(mu, 1.0))


def masked(mu, data):
    y = numpyro.sample("y", dist.Normal(mu, 1.0).expand([3]), obs=data["y"], obs_mask=jnp.array([True, False, True]))
    numpyro.sample("t", dist.Normal(y, 1.0).to_event(1), obs=data["y"])


def inner_subsampled(mu, data):
    with numpyro.plate("units", 3, dim=-1):
        b = numpyro.sample("b", dist.Normal(mu, 1.0))
        with numpyro.plate("visits", 4, subsample_size=2, dim=-2):
            c = numpyro.sample("c", dist.Normal(b, 1.0))
            numpyro.sample("y", dist.Normal(c, 1.0), obs=jnp.zeros((2, 3)))


def needs_local(b):
    return numpyro.sample("mu", dist.Normal(b, 1.0))


def observing_population():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    numpyro.sample("y0", dist.Normal(mu, 1.0), obs=1.0)
    return mu


def subsampled_population():
    with numpyro.plate("groups", 4, subsample_size=2):
        return numpyro.sample("mu", dist.Normal(0.0, 1.0))


def broken_population():
    return numpyro.sample("mu", dist.Normal(0.0, undefined_name))


def theta_by_size(mu, data):
    shift = numpyro.param("shift", jnp.zeros(data["y"].shape[0]))
    numpyro.sample("y", dist.Normal(mu + shift, 1.0).to_event(1), obs=data["y"])


MODELS = [
    ({"silo": discrete}, r"silo 'north' has the discrete latent 'k'.*sum it out"),
    ({"silo": same_site}, r"silo 'north' has the site 'mu' twice, or the population program and it both"),
    ({"silo": unpacks_two}, r"silo 'north' fails when run"),
    ({"silo": observes_nothing}, r"silo 'north' observes nothing.*obs="),
    ({"silo": masked}, r"masks the latent 'y_unobserved'"),
    ({"silo": inner_subsampled}, r"Plate 'visits' is subsampled inside plate 'units'"),
    ({"silo": {"south": silo}}, r"no program for silo 'north'.*'south'"),
    ({"population": needs_local}, r"asks for 'b'.*no local latents"),
    ({"population": observing_population}, r"population program observes 'y0'"),
    ({"population": subsampled_population}, r"subsamples plate 'groups'"),
    ({"population": broken_population}, r"population program fails when run: NameError"),
    (
        {"silo": theta_by_size, "silos": {"north": GOOD, "south": {"y": np.ones(4)}}},
        r"'shift' is of shape \(3,\) in silo 'north' and of shape \(4,\) in silo 'south'",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), MODELS, ids=lambda c: next(iter(c)) if isinstance(c, dict) else "")
def test_models(change, sentence):
    with pytest.raises(sfvi.ModelError, match=sentence):
        fit(**change)


DATA = [
    ({"north": {"y": np.array([1.0, np.nan, 2.0])}}, r"Silo 'north': data\['y'\] has 1 NaN of 3"),
    ({"north": {"y": np.zeros(0)}}, r"Silo 'north' is empty: data\['y'\]"),
    ({"north": {"y": np.array(["a", "b"])}}, r"Silo 'north': data\['y'\] has type"),
    ({"north": {}}, r"Silo 'north' has no arrays"),
    ({"north": GOOD, "south": {"y": np.array([1.0, np.inf])}}, r"Silo 'south': the observed site 'y' has 1 values"),
    ({}, r"at least one silo"),
    ([GOOD], r"mapping from silo name"),
    ({7: GOOD}, r"named 7"),
]


@pytest.mark.parametrize(("silos", "sentence"), DATA)
def test_data(silos, sentence):
    with pytest.raises(sfvi.DataError, match=sentence):
        fit(silos=silos)


def test_a_bad_silo_is_named_among_good_ones():
    silos = {f"s{i}": {"y": np.ones(3)} for i in range(20)}
    silos["s13"] = {"y": np.array([np.nan, 1.0, 1.0])}
    with pytest.raises(sfvi.DataError, match="'s13'"):
        fit(silos=silos)


OPTIONS = [
    ({"num_rounds": 0}, "num_rounds is 0"),
    ({"num_rounds": 1.5}, "num_rounds is 1.5"),
    ({"until_converged": "yes"}, "until_converged is 'yes'"),
    ({"checkpoint_every": -1.0}, "checkpoint_every"),
    ({"unit_ids": {"south": [1, 2, 3]}}, "unit_ids must map every silo to its ids.*north.*south"),
    ({"unit_ids": {"north": [1, 2]}}, r"plate 'units', must be 3 whole numbers"),
    ({"unit_ids": {"north": [1, 1, 2]}}, "hold an id twice"),
    ({"unit_ids": {"north": [-1, 1, 2]}}, "between 0 and"),
    ({"unit_ids": {"north": {"wards": [1, 2, 3]}}}, r"name the plates \['wards'\]"),
    ({"key": "zero"}, "key is 'zero'"),
    ({"algorithm": "sfvi"}, "algorithm is 'sfvi'"),
    ({"algorithm": sfvi.SFVI}, r"give sfvi.SFVI\(...\)"),
]


@pytest.mark.parametrize(("options", "sentence"), OPTIONS, ids=lambda o: next(iter(o)) if isinstance(o, dict) else "")
def test_options(options, sentence):
    with pytest.raises(sfvi.OptionError, match=sentence):
        fit(**options)


def test_units_in_two_silos():
    silos = {"north": GOOD, "south": GOOD}
    with pytest.raises(sfvi.OptionError, match=r"'north' and 'south' share an id \(plate 'units', id 3\)"):
        fit(silos=silos, unit_ids={"north": [1, 2, 3], "south": [3, 4, 5]})


ALGORITHM = [
    ({"estimator": "score"}, "estimator is 'score'"),
    ({"num_samples": 0}, "num_samples is 0"),
    ({"init_scale": 0.0}, "init_scale is 0.0"),
    ({"global_family": "full"}, "global_family is 'full'.*families.full"),
    ({"global_family": sfvi.families.full}, r"give what families.full\(\) returns"),
    ({"local_family": sfvi.families.block}, r"give what families.block\(\) returns"),
    ({"local_family": "block"}, "local_family is 'block'.*families.block"),
    ({"optimizer": 0.01}, "optimizer is 0.01.*optax"),
    ({"local_optimizer": "adam"}, "local_optimizer is 'adam'.*optax"),
]


@pytest.mark.parametrize(("options", "sentence"), ALGORITHM)
def test_algorithm_options(options, sentence):
    with pytest.raises(sfvi.OptionError, match=sentence):
        sfvi.SFVI(**options)


def test_unknown_options_raise():
    with pytest.raises(TypeError, match="learning_rate"):
        sfvi.SFVI(learning_rate=0.1)
    with pytest.raises(TypeError, match="rounds"):
        fit(rounds=10)


def test_stopping_rule_options():
    with pytest.raises(sfvi.OptionError, match="six times check_every"):
        sfvi.StoppingRule(min_rounds=100)
    with pytest.raises(sfvi.OptionError, match="patience"):
        sfvi.StoppingRule(patience=0)


def test_lists_and_frames_are_taken_as_arrays():
    import pandas as pd

    frame = pd.DataFrame({"y": [1.0, 2.0], "unused": [1, 2]})
    result = fit_quietly({"a": {"y": [0.0, 1.0, 2.0]}, "b": {"y": pd.Series([1.0, 2.0])}, "c": frame})
    assert result.silo_names == ["a", "b", "c"]


def fit_quietly(silos):
    return sfvi.fit(
        sfvi.StructuredModel(population, silo),
        silos,
        key=0,
        num_rounds=5,
        algorithm=sfvi.SFVI(optimizer=optax.sgd(0.01)),
    )


def test_a_model_may_look_at_the_values_of_data():
    """What it says is told with the silo's name, of silos that come later too."""

    def ages(data):
        if np.max(data["age"]) > 120:
            raise ValueError("somebody is older than 120 years; check the column age.")

    model = sfvi.StructuredModel(population, silo, check=ages)
    good = GOOD | {"age": np.full(3, 40)}
    assert model.silo_data("north", good).values["data['age']"].shape == (3,)
    with pytest.raises(sfvi.DataError, match=r"^Silo 'south': somebody is older than 120 years; check the column age"):
        sfvi.fit(model, {"north": good, "south": GOOD | {"age": np.full(3, 400)}}, key=0, num_rounds=2)
    with pytest.raises(sfvi.DataError, match=r"^Silo 'south': there is no 'age' in the data; add it"):
        model.silo_data("south", GOOD)
    with pytest.raises(sfvi.ModelError, match="check is 'ages'; give a function"):
        sfvi.StructuredModel(population, silo, check="ages")
