"""The No-U-Turn sampler on data that one party holds: the answer that others are measured by."""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from .._random import as_key
from .._types import Key
from ..errors import DataError, ModelError, OptionError
from ..model import StructuredModel


class NutsDraws(NamedTuple):
    """Draws of the global latents.

    Attributes:
        draws: By site, chains one after the other.
        r_hat: The largest split r-hat of a coordinate.
    """

    draws: dict[str, np.ndarray]
    r_hat: float

    def columns(self) -> np.ndarray:
        """A row for each draw, a column for each coordinate, in the model's own space."""
        return np.concatenate([values.reshape(len(values), -1) for values in self.draws.values()], axis=1)


def nuts(
    model: StructuredModel,
    silos: Mapping[str, Any],
    *,
    key: Key | int,
    num_draws: int = 2000,
    num_warmup: int | None = None,
    num_chains: int = 2,
    target_accept: float = 0.9,
    progress: bool | None = None,
) -> NutsDraws:
    """Sample the posterior of all latents given the data of some silos, and keep the global ones.

    Args:
        model: The model; it must have no parameters to learn.
        silos: Data by silo name; all of them for the pooled answer, one for a silo by itself.
        key: Of all randomness.
        num_draws: Of each chain.
        num_warmup: Steps of each chain before; as many as draws by default.
        num_chains: Chains, run side by side.
        target_accept: Acceptance probability that the step size is tuned to.
        progress: Show a bar; by default only on a terminal.
    """
    if not silos:
        raise DataError("nuts: there are no silos; give the data of at least one.")
    if num_draws < 4 or num_chains < 1:
        raise OptionError(f"nuts: {num_draws} draws of {num_chains} chains; give at least 4 and 1.")
    data = {name: model.silo_data(name, values) for name, values in silos.items()}
    if theta := model.initial_theta(as_key(0), data):
        raise ModelError(f"NUTS samples latents, and {min(theta)!r} is a parameter; give it a prior or a value.")
    sampler = MCMC(
        NUTS(model.as_one_program(silos), target_accept_prob=target_accept),
        num_warmup=num_draws if num_warmup is None else num_warmup,
        num_samples=num_draws,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=sys.stderr.isatty() if progress is None else progress,
    )
    sampler.run(as_key(key))
    names = [site.name for site in model.population.layout.sites]
    by_chain = {name: np.asarray(sampler.get_samples(group_by_chain=True)[name]) for name in names}
    r_hat = max(float(np.max(split_gelman_rubin(values))) for values in by_chain.values())
    return NutsDraws({name: values.reshape(-1, *values.shape[2:]) for name, values in by_chain.items()}, r_hat)
