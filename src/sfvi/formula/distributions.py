"""Priors of quantities on the original scale, as distributions of what is sampled inside."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints


class Recoded(dist.Distribution):
    r"""Inner coefficients $z$ for which $\gamma = P z + c$ has independent priors.

    $$\log p(z) = \sum_k \log p_k(\gamma_k) + \log\lvert\det P\rvert$$

    Args:
        priors: $p_k$.
        matrix: $P$, invertible.
        shift: $c$.
    """

    support = constraints.real_vector  # pyright: ignore[reportAssignmentType]
    pytree_data_fields = ("priors", "matrix", "inverse", "shift", "log_det")

    def __init__(self, priors: Sequence[dist.Distribution], matrix: np.ndarray, shift: np.ndarray):
        self.priors = tuple(priors)
        self.matrix = jnp.asarray(matrix)
        self.inverse = jnp.asarray(np.linalg.inv(matrix))
        self.shift = jnp.asarray(shift)
        self.log_det = jnp.asarray(np.linalg.slogdet(matrix)[1])
        super().__init__(event_shape=(len(self.priors),))

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        keys = jax.random.split(key, len(self.priors))
        gamma = [prior.sample(key, sample_shape) for prior, key in zip(self.priors, keys, strict=True)]
        return (jnp.stack(gamma, axis=-1) - self.shift) @ self.inverse.T

    def log_prob(self, value: Any, intermediates: Any = None) -> Any:
        del intermediates
        gamma = value @ self.matrix.T + self.shift
        if all(type(prior) is dist.Normal for prior in self.priors):  # one operation to compile instead of many
            loc, scale = (jnp.stack([jnp.asarray(getattr(p, name)) for p in self.priors]) for name in ("loc", "scale"))
            return dist.Normal(loc, scale).log_prob(gamma).sum(-1) + self.log_det
        return sum(prior.log_prob(gamma[..., k]) for k, prior in enumerate(self.priors)) + self.log_det


class Rescaled(dist.Distribution):
    r"""A positive $v$ for which $u v$ has a given prior: $\log p(v) = \log p_0(u v) + \log u$.

    Args:
        prior: $p_0$.
        unit: $u$.
    """

    support = constraints.positive  # pyright: ignore[reportAssignmentType]
    pytree_data_fields = ("prior", "unit")

    def __init__(self, prior: dist.Distribution, unit: float):
        self.prior = prior
        self.unit = jnp.asarray(float(unit))
        super().__init__()

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        return self.prior.sample(key, sample_shape) / self.unit

    def log_prob(self, value: Any, intermediates: Any = None) -> Any:
        del intermediates
        return self.prior.log_prob(value * self.unit) + jnp.log(self.unit)
