r"""Who takes part in a round, and with which weight.

A silo that takes part with probability $\pi_j$ counts $1 / \pi_j$ when it does: averaged over who takes part, sums
over silos are those of full participation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._types import Key
from ..errors import OptionError, first_line

ROUNDING = 1e-6  # by so much a computed probability may exceed one
Rule = Callable[[Key, Int[Array, ""], int], tuple[Any, Any]]


class Participants(NamedTuple):
    r"""The silos of a round.

    Attributes:
        index: Their positions among the sorted names of all silos.
        weight: $1 / \pi_j$; 0 for a silo that is listed but absent.
    """

    index: Int[Array, " listed"]
    weight: Float[Array, " listed"]


@runtime_checkable
class Participation(Protocol):
    """Draws the participants of a round."""

    @property
    def partial(self) -> bool:
        """Whether a silo may be absent at all."""
        ...

    def draw(self, key: Key, round: Int[Array, ""], num_silos: int) -> Participants:
        """Draw from the key and the number of the round; how many are listed depends on `num_silos` only."""
        ...


class Everyone(NamedTuple):
    """All silos, in every round."""

    @property
    def partial(self) -> bool:
        return False

    def draw(self, key: Key, round: Int[Array, ""], num_silos: int) -> Participants:
        """All, with weight one."""
        del key, round
        return Participants(jnp.arange(num_silos), jnp.ones(num_silos, jnp.result_type(float)))


class Sampled(NamedTuple):
    """The same number of silos in every round, drawn without replacement."""

    count: int | None = None
    share: float = 1.0

    @property
    def partial(self) -> bool:
        return True

    def draw(self, key: Key, round: Int[Array, ""], num_silos: int) -> Participants:
        r"""Draw $k$ of $J$ silos: $\pi_j = k / J$."""
        size = self.count if self.count is not None else max(1, int(np.floor(self.share * num_silos + 0.5)))
        if size > num_silos:
            raise OptionError(f"participation.count({size}) asks for more than the {num_silos} silos that there are.")
        order = jax.random.permutation(jax.random.fold_in(key, round), num_silos)
        return Participants(jnp.sort(order[:size]), jnp.full(size, num_silos / size, jnp.result_type(float)))


class ByRule(NamedTuple):
    """Whatever a user's function says."""

    function: Rule

    @property
    def partial(self) -> bool:
        return True

    def draw(self, key: Key, round: Int[Array, ""], num_silos: int) -> Participants:
        """List all silos; those absent weigh nothing."""
        try:
            found = self.function(jax.random.fold_in(key, round), round, num_silos)
        except Exception as error:
            raise OptionError(
                f"The participation rule fails ({first_line(error)}); it takes (key, round, num_silos) and must be "
                "made of JAX operations."
            ) from error
        try:
            present, probability = (jnp.asarray(part) for part in found)
        except (TypeError, ValueError):
            raise OptionError(
                "The participation rule must return two arrays, who is present and with which probability."
            ) from None
        fits = present.shape == (num_silos,) and probability.shape in ((), (num_silos,))
        if not fits or present.dtype != bool or jnp.iscomplexobj(probability):
            raise OptionError(
                f"The participation rule returned shapes {present.shape} ({present.dtype}) and {probability.shape} "
                f"({probability.dtype}); it must return {num_silos} booleans and as many probabilities, or one."
            )
        probability = jnp.broadcast_to(probability, present.shape).astype(jnp.result_type(float))
        return Participants(jnp.arange(num_silos), _inverse(present, probability))


def _inverse(present: Bool[Array, " silos"], probability: Float[Array, " silos"]) -> Float[Array, " silos"]:
    """A present silo whose probability is not in (0, 1] cannot be: its weight is NaN and stops the run."""
    possible = (probability > 0) & (probability <= 1 + ROUNDING)
    return jnp.where(present, jnp.where(possible, 1.0 / jnp.where(possible, probability, 1.0), jnp.nan), 0.0)


def everyone() -> Everyone:
    """All silos take part in every round."""
    return Everyone()


def count(number: int) -> Sampled:
    """So many silos take part in a round, drawn afresh each time."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise OptionError(f"participation.count: number is {number!r}; give a whole number of at least 1.")
    return Sampled(count=number)


def fraction(share: float) -> Sampled:
    """This part of all silos takes part in a round (rounded, at least one), drawn afresh each time."""
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise OptionError(f"participation.fraction: share is {share!r}; give a number above 0 and at most 1.")
    return Sampled(share=float(share))


def rule(function: Rule) -> ByRule:
    r"""A user's rule decides.

    Args:
        function: Takes a key, the number of the round and the number of silos; returns booleans, who is present, and
            their inclusion probabilities $\pi_j$ in (0, 1] (or one for all), in the order of the silos' sorted names.
            It is compiled, so it must be made of JAX operations, and all its randomness must come from the key.
    """
    if not callable(function):
        raise OptionError(f"participation.rule: {function!r} is not a function of (key, round, num_silos).")
    return ByRule(function)
