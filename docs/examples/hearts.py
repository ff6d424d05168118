"""What three hospitals install: the model of a study. As a script it writes their tables, which they have anyway."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import sfvi

PREDICTORS = {"age": (54, 9), "sex": (0.8, 0.4), "thalach": (138, 26), "exang": (0.4, 0.5), "oldpeak": (0.9, 1.1)}


def population():
    """Effects that all hospitals share, and how much hospitals differ."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([len(PREDICTORS)]).to_event(1))
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    return beta, mean, tau


def silo(shared, data):
    """A hospital's own level, and the disease of its patients."""
    beta, mean, tau = shared
    level = numpyro.sample("level", dist.Normal(mean, tau))
    x = jnp.stack([(data[name] - center) / scale for name, (center, scale) in PREDICTORS.items()], axis=-1)
    with numpyro.plate("patients", x.shape[0]):
        numpyro.sample("disease", dist.Bernoulli(logits=level + x @ beta), obs=data["disease"])


model = sfvi.StructuredModel(population, silo, dims={"beta": ["predictor"]}, coords={"predictor": list(PREDICTORS)})

if __name__ == "__main__":
    for hospital, table in sfvi.data.heart_disease().items():
        table[[*PREDICTORS, "disease"]].dropna().to_csv(f"{hospital}.csv", index=False)
