"""A variational autoencoder over silos, on small pictures of bars."""

import jax
import numpy as np
import optax
import pytest
from numpyro.infer import init_to_sample

import sfvi
from sfvi.zoo import deep_latent_gaussian, image_encoder

SIZES = {"num_latents": 3, "num_hidden": 16}


def bars(n, seed):
    """28 x 28 pictures with a horizontal and a vertical bar."""
    generator = np.random.default_rng(seed)
    pictures = np.zeros((n, 28, 28), np.uint8)
    for picture, (row, column) in zip(pictures, generator.integers(0, 7, (n, 2)), strict=True):
        picture[4 * row : 4 * row + 4] = 1
        picture[:, 4 * column : 4 * column + 4] = 1
    return {"x": pictures.reshape(n, 784)}


@pytest.mark.parametrize("decoder", ["parameters", "latents"])
def test_learns_to_reconstruct_unseen_images(decoder):
    silos = {"a": bars(80, 0), "b": bars(60, 1)}
    algorithm = sfvi.SFVI(
        local_family=image_encoder(jax.random.key(0), **SIZES),
        optimizer=optax.adam(1e-2),
        global_family=sfvi.families.mean_field(),
        init_loc_fn=init_to_sample,
        init_scale=0.01,
    )
    model = deep_latent_gaussian(decoder=decoder, batch_size=30, **SIZES)
    fit = sfvi.fit(model, silos, key=0, num_rounds=600, algorithm=algorithm)
    unseen = bars(25, 2)
    found = np.asarray(sfvi.fit_silo(fit.posterior, "new", unseen, key=0, num_steps=0).sample(0, 20)["image"]).mean(0)
    average = silos["a"]["x"].mean(0)
    error, blind = (np.mean((picture - unseen["x"]) ** 2) for picture in (found, average))
    assert error < 0.75 * blind


def test_averaging_networks_and_decoders():
    silos = {"a": bars(40, 0), "b": bars(40, 1)}
    algorithm = sfvi.SFVIAvg(
        num_local_steps=20, local_family=image_encoder(jax.random.key(0), **SIZES), optimizer=optax.adam(1e-2)
    )
    model = deep_latent_gaussian(batch_size=20, **SIZES)
    fit = sfvi.fit(model, silos, key=0, num_rounds=10, algorithm=algorithm)
    assert fit.elbo[-1] > fit.elbo[0] + 80 * 100
    assert fit.theta["pixels"].shape == (16, 784)


def test_bad_options():
    with pytest.raises(sfvi.OptionError, match="decoder is 'both'"):
        deep_latent_gaussian(decoder="both")
