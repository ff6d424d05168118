"""A deep latent Gaussian model of Fashion-MNIST over ten silos: `python -m experiments.vae`."""

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import typer
from numpyro.infer import init_to_sample

import sfvi
from sfvi.algorithms import Elbo
from sfvi.data import by_label, fashion_mnist, mnist
from sfvi.zoo import deep_latent_gaussian, image_encoder

FOLDER = Path(__file__).parent
NUM_SILOS, BATCH, STEP_SIZE = 10, 100, 1e-3
LOCAL_STEPS = 100
NUM_TEST = 2000
LOADERS = {"mnist": mnist, "fashion_mnist": fashion_mnist}


def main(
    dataset: Annotated[str, typer.Option(help="mnist or fashion_mnist.")] = "fashion_mnist",
    num_steps: Annotated[int, typer.Option(help="Optimizer steps of every method.")] = 5000,
    num_images: Annotated[int, typer.Option(help="Images of each silo.")] = 2000,
    output: Annotated[Path, typer.Option(help="Folder for the table and the picture.")] = FOLDER,
):
    """Train by SFVI, SFVI-Avg and in one silo alone, decoder as parameters or latents; compare on unseen images."""
    images = LOADERS[dataset]()
    binary = [(x.reshape(len(x), -1) > 127).astype(np.uint8) for x in (images.train_x, images.test_x)]
    positions = by_label(images.train_y, NUM_SILOS, share=0.9, seed=0)
    pick = np.random.default_rng(0)
    silos = {name: {"x": binary[0][pick.permutation(rows)[:num_images]]} for name, rows in positions.items()}
    unseen = binary[1][:NUM_TEST]
    results, fits = {}, {}
    for name, (decoder, algorithm, rounds, data) in runs(silos, num_steps).items():
        model = deep_latent_gaussian(decoder=decoder, batch_size=BATCH)
        fit = sfvi.fit(model, data, key=0, num_rounds=rounds, algorithm=algorithm)
        results[name] = {
            "test ELBO, nats an image": round(unseen_elbo(decoder, fit, unseen), 2),
            "exchanges": rounds if len(data) > 1 else 0,
        }
        fits[name] = fit
        print(name, results[name], flush=True)
    output.mkdir(parents=True, exist_ok=True)
    settings = {"dataset": dataset, "steps": num_steps, "images a silo": num_images, "silos": NUM_SILOS}
    text = json.dumps({"settings": settings, "results": results}, indent=2)
    (output / "results.json").write_text(text + "\n")
    draw(fits, unseen[:10], output / "reconstructions.png")


def runs(silos, num_steps):
    """By name: what the decoder is, the algorithm, its rounds, and the data."""
    common = {"local_family": image_encoder(jax.random.key(1)), "optimizer": optax.adam(STEP_SIZE)}
    start = sfvi.SFVI(**common)
    bayesian = sfvi.SFVI(**common, init_loc_fn=init_to_sample, init_scale=0.01)
    average = sfvi.SFVIAvg(num_local_steps=LOCAL_STEPS, **common)
    first = next(iter(silos))
    return {
        "SFVI, decoder as parameters": ("parameters", start, num_steps, silos),
        "SFVI-Avg, decoder as parameters": ("parameters", average, num_steps // LOCAL_STEPS, silos),
        "SFVI, decoder as latents": ("latents", bayesian, num_steps, silos),
        f"{first} alone, decoder as parameters": ("parameters", start, num_steps, {first: silos[first]}),
    }


def unseen_elbo(decoder: Literal["parameters", "latents"], fit, unseen, num_draws=5) -> float:
    """The ELBO of images that no silo holds, by the encoder alone; global latents are drawn from their posterior."""
    model = deep_latent_gaussian(decoder=decoder, batch_size=None)
    data = model.silo_data("unseen", {"x": unseen})
    elbo = Elbo(sfvi.SFVI(local_family=fit.posterior.local_family), model)
    shared, free = fit.posterior.shared, elbo.start_local(data)

    @jax.jit
    def one(shared, number):
        noise = elbo.global_noise(jax.random.key(number), shared, 1)
        return elbo.silo(shared, free, elbo.draw(jax.random.key(7), number, data, noise), data)

    return float(np.mean([one(shared, jnp.asarray(i)) for i in range(num_draws)])) / len(unseen)


def draw(fits, images, path):
    """Unseen images above, the posterior mean of their pixels by each method below."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = {"unseen images": images}
    for name, fit in fits.items():
        posterior = sfvi.fit_silo(fit.posterior, "unseen", {"x": images}, key=0, num_steps=0)
        rows[name] = np.asarray(posterior.sample(0, 50)["image"]).mean(0)
    figure, axes = plt.subplots(len(rows), len(images), figsize=(len(images), 1.15 * len(rows)))
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        line[0].set_title(name, loc="left", fontsize=9)
        for axis, picture in zip(line, pictures, strict=True):
            axis.imshow(picture.reshape(28, 28), cmap="gray_r", vmin=0, vmax=1)
            axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    typer.run(main)
