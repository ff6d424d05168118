"""Replies as vectors that may be added up before anyone sees them, and what the server makes of their sum.

A silo sends its reply times its weight, the weight, and its part of the ELBO (zero if that is not told).
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from ..algorithms import FederatedAlgorithm
from ..errors import OptionError
from ..families import MeanFieldGaussian


class Combined(NamedTuple):
    """What comes of the replies of a round.

    Attributes:
        reply: The one that stands for all: of weight one.
        elbo: The sum of their parts.
    """

    reply: Any
    elbo: float


def check(algorithm: FederatedAlgorithm, broadcast_like: Any) -> None:
    """Refuse an algorithm that needs more than a sum."""
    name = type(algorithm).__name__.removeprefix("Bound")
    if algorithm.combines is None:
        raise OptionError(f"secure_sum: {name} needs each silo's reply; use SFVI, SFVIAvg or Sites.")
    if algorithm.combines == "mean" and not isinstance(broadcast_like.shared.family, MeanFieldGaussian):
        raise OptionError(
            f"secure_sum: {name} averages a {type(broadcast_like.shared.family).__name__} in a way that is no sum; "
            "use global_family=families.mean_field(), SFVI or Sites."
        )


def outgoing(
    algorithm: FederatedAlgorithm, reply: Any, *, weight: float, num_units: float, elbo: float
) -> Float[np.ndarray, " n"]:
    """A silo's summand.

    Args:
        algorithm: What made the reply.
        reply: The silo's.
        weight: By which it counts as one of those who take part.
        num_units: Of the silo.
        elbo: Its part of the ELBO.
    """
    mine = {"weighted sum": weight, "sum": 1.0, "mean": weight}[str(algorithm.combines)]
    if getattr(algorithm, "weights", None) == "units":
        mine *= num_units
    vector, _ = ravel_pytree(_straight(algorithm, reply))
    return np.concatenate([mine * np.asarray(vector, np.float64), [mine, weight * elbo]])


def incoming(algorithm: FederatedAlgorithm, silent: Any, total: Float[np.ndarray, " n"], *, scale: float) -> Combined:
    """What the server makes of the sum.

    Args:
        algorithm: What made the replies.
        silent: What a reply looks like.
        total: The sum of summands.
        scale: By what it stands for those who did not come.
    """
    *numbers, weight, elbo = total
    factor = {"weighted sum": scale, "sum": 1.0, "mean": 1.0 / weight if weight else 0.0}[str(algorithm.combines)]
    like, rebuild = ravel_pytree(_straight(algorithm, silent))
    return Combined(_bent(algorithm, rebuild(jnp.asarray(np.asarray(numbers) * factor, like.dtype))), elbo * scale)


def size(silent_like: Any) -> int:
    """Numbers of a summand."""
    return sum(leaf.size for leaf in jax.tree.leaves(silent_like)) + 2


def _straight(algorithm, reply):
    """Parameters of which the mean is wanted: standard deviations instead of their logarithms."""
    if algorithm.combines != "mean":
        return reply
    return eqx.tree_at(lambda r: r.shared.family.log_scale, reply, jnp.exp(reply.shared.family.log_scale))


def _bent(algorithm, reply):
    if algorithm.combines != "mean":
        return reply
    return eqx.tree_at(lambda r: r.shared.family.log_scale, reply, jnp.log(reply.shared.family.log_scale))
