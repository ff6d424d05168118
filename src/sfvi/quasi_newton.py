"""L-BFGS uphill, one evaluation at a time: for objectives whose value has to be asked for.

`trial` is the point to evaluate next, `told` takes the answer. A trial that brings enough of what was promised
becomes the best point and a new direction starts there; otherwise the next trial is nearer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from ._types import Scalar

SUFFICIENT = 1e-4  # share of the promised gain that a trial must bring
SHRINK = 0.3
MAX_TRIES = 6
LONGEST = 1.0  # change of any parameter by one trial
MEMORY = 20

Point = Float[Array, " n"]


class Climb(NamedTuple):
    """What is known so far.

    Attributes:
        best: The best point.
        value: Of the objective there.
        gradient: There.
        direction: Where to go from it.
        length: How far along it the next trial is.
        tries: Trials in this direction that were not good enough.
        memory: Of L-BFGS.
        first: Whether nothing is known yet.
    """

    best: Point
    value: Scalar
    gradient: Point
    direction: Point
    length: Scalar
    tries: Int[Array, ""]
    memory: optax.OptState
    first: Bool[Array, ""]

    @property
    def trial(self) -> Point:
        """Where to evaluate next."""
        return self.best + self.length * self.direction

    def told(self, value: Scalar, gradient: Point) -> "Climb":
        """Take in value and gradient at the trial."""
        promised = self.length * jnp.vdot(self.gradient, self.direction)
        finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
        good = self.first | (finite & (value >= self.value + SUFFICIENT * promised))
        return jax.tree.map(lambda yes, no: jnp.where(good, yes, no), self._accept(value, gradient), self._refuse())

    def _accept(self, value, gradient):
        with jax.numpy_dtype_promotion("standard"):
            updates, memory = _solver().update(-gradient, self.memory, self.trial)
        newton = -jnp.asarray(updates)
        direction = jnp.where(jnp.vdot(newton, gradient) > 0, newton, gradient)
        longest = jnp.max(jnp.abs(direction), initial=0.0)
        direction = direction * jnp.minimum(1.0, LONGEST / jnp.maximum(longest, 1e-30))
        one, none = jnp.ones_like(self.length), jnp.zeros_like(self.tries)
        return Climb(self.trial, value, gradient, direction, one, none, memory, jnp.asarray(False))

    def _refuse(self):
        """Go less far; after many tries forget what was learned and start along the gradient."""
        lost = self.tries + 1 >= MAX_TRIES
        steepest = self.gradient / jnp.maximum(jnp.max(jnp.abs(self.gradient), initial=0.0), 1e-30)
        fresh = _solver().init(self.best)
        return self._replace(
            direction=jnp.where(lost, 0.01 * steepest, self.direction),
            length=jnp.where(lost, 1.0, SHRINK * self.length),
            tries=jnp.where(lost, 0, self.tries + 1),
            memory=jax.tree.map(lambda new, old: jnp.where(lost, new, old), fresh, self.memory),
            first=jnp.asarray(False),
        )


def begin(point: Point) -> Climb:
    """Know nothing but where to look first."""
    zero, nowhere = jnp.zeros((), point.dtype), jnp.zeros_like(point)
    return Climb(
        point, zero, nowhere, nowhere, zero, jnp.zeros((), jnp.int32), _solver().init(point), jnp.asarray(True)
    )


def maximize(objective: Callable[[Any], Scalar], start: Any, *, iterations: int, tolerance: float = 1e-6) -> Any:
    """The top of a function of a tree, to a gradient that much smaller than at the start, or until they are up."""
    point, rebuild = ravel_pytree(start)
    if point.size == 0:
        return start

    def step(carry):
        climb, count, size = carry
        value, gradient = jax.value_and_grad(lambda point: objective(rebuild(point)))(climb.trial)
        size = jnp.where(climb.first, jnp.linalg.norm(gradient), size)
        return climb.told(value, gradient), count + 1, size

    def going(carry):
        climb, count, size = carry
        return (count < iterations) & (climb.first | (jnp.linalg.norm(climb.gradient) > tolerance * size))

    count, size = jnp.zeros((), jnp.int32), jnp.zeros((), point.dtype)
    climb, _, _ = jax.lax.while_loop(going, step, (begin(point), count, size))
    return rebuild(climb.best)


def _solver():
    return optax.scale_by_lbfgs(memory_size=MEMORY)
