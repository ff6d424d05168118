"""What families refuse: options that mean nothing, and inference networks that do not fit the data or the file."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import sfvi
from sfvi import families

KEY = jax.random.key(2)
ALGORITHMS = {
    "SFVI": sfvi.SFVI,
    "SFVIAvg": lambda **options: sfvi.SFVIAvg(num_local_steps=1, refit_steps=0, **options),
}


def population():
    return numpyro.sample("mu", dist.Normal(0.0, 1.0))


def silo(mu, data):
    with numpyro.plate("units", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(b, 1.0), obs=data["y"])


MODEL = sfvi.StructuredModel(population, silo)
SILOS = {"a": {"y": np.array([0.5, -1.0, 2.0])}, "b": {"y": np.array([0.0])}}


def column(data):
    return data["y"][:, None]


def mlp(activation=jnp.tanh, size=1):
    return eqx.nn.MLP(size, 2, 4, 1, activation=activation, key=KEY)


def fit(algorithm="SFVI", silos=SILOS, model=MODEL, **options):
    return sfvi.fit(model, silos, key=0, num_rounds=2, algorithm=ALGORITHMS[algorithm](**options))


@pytest.mark.parametrize("rank", [0, "a", 2.5, True])
def test_rank(rank):
    """As users call it: here the type checks of the tests would come first."""
    with pytest.raises(sfvi.OptionError, match=f"rank is {rank!r}; give a whole number"):
        inspect.unwrap(families.low_rank)(rank=rank)


@pytest.mark.parametrize("otherwise", [3, 0, families.block, families.amortized])
def test_otherwise(otherwise):
    with pytest.raises(sfvi.OptionError, match=r"otherwise is .*; give what families.block"):
        families.amortized(mlp(), column, otherwise=otherwise)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_functions_that_return_no_family(algorithm):
    with pytest.raises(sfvi.OptionError, match="global_family returns 3; give"):
        fit(algorithm, global_family=lambda loc, scale: 3)
    with pytest.raises(sfvi.OptionError, match="local_family returns 'block'; give"):
        fit(algorithm, local_family=lambda *args: "block")


def centered(data):
    return column(data) - data["y"].mean()


def from_the_median(data):
    return column(data) - jnp.median(data["y"])


def from_the_next(data):
    return column(data) - jnp.roll(column(data), -1)


def centered_codes(data):
    return data["code"][:, None] - data["code"].mean()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("inputs", [centered, from_the_median, from_the_next, centered_codes])
def test_inputs_that_mix_units_are_refused_whatever_the_algorithm(algorithm, inputs):
    """One silo: nothing that an engine does with several could show it."""
    silos = {"a": {"y": np.array([0.5, -1.0, 2.0, 0.1]), "code": np.array([1, 3, 2, 2])}}
    with pytest.raises(sfvi.OptionError, match="unit of silo 'a' depends on other units"):
        fit(algorithm, silos, local_family=families.amortized(mlp(), inputs))


def test_arrays_that_only_happen_to_be_as_long_as_the_plate_are_no_units():
    def profile(mu, data):
        with numpyro.plate("units", data["y"].shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(b[:, None], 1.0).to_event(1), obs=data["y"])

    model, times = sfvi.StructuredModel(population, profile), np.array([1.0, 2.0, 3.0])
    chosen = families.amortized(mlp(), lambda data: (data["y"] * data["t"]).sum(1, keepdims=True))
    one = {"a": {"y": np.arange(9.0).reshape(3, 3), "t": times}}
    fit("SFVI", one, model, local_family=chosen)
    fit("SFVIAvg", one | {"b": {"y": np.ones((3, 3)), "t": times}}, model, local_family=chosen)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_inputs_that_are_not_finite(algorithm):
    chosen = families.amortized(mlp(), lambda data: jnp.log(data["y"])[:, None])
    with pytest.raises(sfvi.DataError, match="inputs returns non-finite numbers for silo 'a'"):
        fit(algorithm, local_family=chosen)
    fitted = fit(silos={"a": {"y": np.array([1.0, 2.0])}}, local_family=chosen)
    with pytest.raises(sfvi.DataError, match="inputs returns non-finite numbers for silo 'new'"):
        sfvi.fit_silo(fitted.posterior, "new", {"y": np.array([-1.0])}, key=0, num_steps=0)


def two_plates(mu, data):
    silo(mu, data)
    with numpyro.plate("wards", 2):
        numpyro.sample("ward", dist.Normal(mu, 1.0))


NAMED = [
    (families.amortized(mlp(), lambda data: data["age"]), r"inputs fails on the data of silo 'a' \(KeyError: 'age'\)"),
    (families.amortized(mlp(), lambda data: data["y"][None]), "inputs of silo 'a' have shape"),
    (families.amortized(mlp(size=2), column), "cannot take one unit's inputs of silo 'a'"),
    (families.amortized(eqx.nn.MLP(1, 3, 4, 1, key=KEY), column), "one unit of silo 'a'; it must return 2"),
]


@pytest.mark.parametrize(("chosen", "words"), NAMED)
def test_the_silo_is_named(chosen, words):
    with pytest.raises((sfvi.OptionError, sfvi.DataError), match=words) as caught:
        fit(local_family=chosen)
    assert "\n" not in str(caught.value)


def test_the_silo_with_two_plates_is_named():
    model = sfvi.StructuredModel(population, two_plates)
    with pytest.raises(sfvi.OptionError, match="silo 'a' has 2 plates"):
        fit(model=model, local_family=families.amortized(mlp(), column))


def pair(data):
    """Inputs of one unit in a tree."""
    return {"y": data["y"], "more": (data["y"], [data["y"] + 1.0])}


class Pair(eqx.Module):
    layers: eqx.nn.MLP
    sign: float

    def __call__(self, unit):
        return self.layers(self.sign * unit["y"][None] + unit["more"][1][0])


def test_a_file_is_read_only_with_the_network_that_made_it(tmp_path):
    fitted = fit(local_family=families.amortized(mlp(), column))
    fitted.save(tmp_path)
    same = sfvi.load(tmp_path, MODEL, SILOS, local_family=families.amortized(mlp(), column))
    np.testing.assert_array_equal(same.silo("a").sample(0, 3)["b"], fitted.silo("a").sample(0, 3)["b"])
    other = families.amortized(mlp(jax.nn.relu), column)
    with pytest.raises(sfvi.ArchiveError, match="computes something else"):
        sfvi.load(tmp_path, MODEL, SILOS, local_family=other)
    with pytest.raises(sfvi.ArchiveError, match="computes something else"):
        sfvi.GlobalPosterior.load(tmp_path / "global.npz", MODEL, local_family=other)
    with pytest.raises(sfvi.ArchiveError, match="other inputs of the inference network"):
        sfvi.load(tmp_path, MODEL, SILOS, local_family=families.amortized(mlp(), lambda data: -column(data)))
    same.save(tmp_path / "again")
    with pytest.raises(sfvi.ArchiveError, match="computes something else"):
        sfvi.load(tmp_path / "again", MODEL, {}, local_family=other)


def test_networks_of_trees_are_known_again(tmp_path):
    fitted = fit(local_family=families.amortized(Pair(mlp(), 1.0), pair))
    fitted.save(tmp_path)
    sfvi.load(tmp_path, MODEL, SILOS, local_family=families.amortized(Pair(mlp(), 1.0), pair))
    with pytest.raises(sfvi.ArchiveError, match="computes something else"):
        sfvi.load(tmp_path, MODEL, {}, local_family=families.amortized(Pair(mlp(), -1.0), pair))


def test_a_checkpoint_is_resumed_only_with_the_network_that_made_it(tmp_path):
    def run(network, inputs):
        algorithm = sfvi.SFVI(local_family=families.amortized(network, inputs))
        sfvi.fit(MODEL, SILOS, key=0, num_rounds=2, algorithm=algorithm, checkpoint=tmp_path / "run.npz")

    run(mlp(), column)
    run(mlp(), column)
    for network, inputs in [(mlp(jax.nn.relu), column), (mlp(), lambda data: -column(data))]:
        with pytest.raises(sfvi.ArchiveError, match="another inference network"):
            run(network, inputs)
