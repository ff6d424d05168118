r"""Sums and noise in whole numbers, so that the last digits of what leaves a silo tell nothing.

A Gaussian in floating point takes values whose gaps depend on what it is added to, and none beyond five or six
standard deviations: who knows all other units can read more from single bits than $\epsilon$ says (Mironov 2012). Here
every summand is a vector of whole multiples of $\gamma$ of norm at most $C$, their sum is exact in whatever order, and
the noise is a discrete Gaussian, whose Rényi divergences are at most those of the Gaussian (Canonne et al. 2020):

$$y = \gamma \Big(\sum_i k_i + Z\Big), \qquad \gamma \lVert k_i \rVert \le C, \qquad
  P(Z = z) \propto e^{-z^2 / 2 S^2}, \qquad \gamma = \sigma C / S$$

$Z = Z_0 + m Z_1 + m^2 Z_2 + m^3 Z_3$, each a discrete Gaussian of width s by inversion from 64 random bits, so that
$S^2 = s^2 (1 + m^2 + m^4 + m^6)$: about $2^{21}$. That this is a discrete Gaussian too holds to one part in $10^{30}$
of every probability ($6 e^{-2 \pi^2 r^2 / m^2}$ with r just below s); inversion is off by less than $10^{-15}$ in all
of them together.
"""

import decimal
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt32

from .._types import Key

WIDTH, STEP, LEVELS = 64, 32, 4  # s, m, and how many Z
FARTHEST = 600  # of a Z: more than 9 s, beyond which less than one of 2^64 lies
SPREAD = WIDTH * math.sqrt(sum(STEP ** (2 * level) for level in range(LEVELS)))  # S
BISECTIONS = (2 * FARTHEST).bit_length()
HALF = 16  # bits


class Whole(NamedTuple):
    r"""Whole numbers $2^{16} h + l$ of 47 bits, which single words would be too short for.

    Attributes:
        high: $h$.
        low: $l$, from 0 to $2^{16} - 1$; more in a sum that has not been carried.
    """

    high: Int32[Array, "*n"]
    low: Int32[Array, "*n"]

    @classmethod
    def of(cls, numbers: Int32[Array, "*n"]) -> "Whole":
        """Take numbers apart."""
        return cls(numbers >> HALF, numbers & ((1 << HALF) - 1))

    def plus(self, other: "Whole") -> "Whole":
        """The sum, carried; of the parts of one of the two there may be up to 16,000 added up before."""
        low = self.low + other.low
        return Whole(self.high + other.high + (low >> HALF), low & ((1 << HALF) - 1))


class Grid(NamedTuple):
    r"""Multiples of $\gamma$.

    Attributes:
        step: $\gamma$.
        clip: $C$.
    """

    step: float
    clip: float

    def summand(self, vector: Float[Array, " n"]) -> Whole:
        """A vector of norm C at most on the grid: the nearest one, or where that is longer, the next toward zero."""
        scaled, longest = vector / self.step, self.clip / self.step
        room = 1 - min(1.0, (vector.shape[0] + 8) * float(jnp.finfo(vector.dtype).eps))  # by so much norms may be off
        nearest = jnp.round(scaled)
        fits = jnp.linalg.norm(nearest) <= room * longest
        return Whole.of(jnp.where(fits, nearest, jnp.trunc(room * scaled)).astype(jnp.int32))

    def noisy(self, key: Key, total: Whole, dtype: jnp.dtype) -> Float[Array, " n"]:
        """A sum with noise, as numbers; rounding them tells nothing more."""
        found = total.plus(Whole.of(discrete_gaussian(key, total.low.shape)))
        return found.high.astype(dtype) * (2.0**HALF * self.step) + found.low.astype(dtype) * self.step


def discrete_gaussian(key: Key, shape: tuple[int, ...]) -> Int32[Array, "*n"]:
    r"""Draw whole numbers with $P(z) \propto e^{-z^2 / 2 S^2}$."""
    words = jax.random.bits(key, (2, LEVELS, *shape), jnp.uint32)
    digits = _inverted(words[0], words[1])
    return sum((STEP**level * digits[level] for level in range(1, LEVELS)), digits[0])


def _inverted(high: UInt32[Array, "*n"], low: UInt32[Array, "*n"]) -> Int32[Array, "*n"]:
    """Of 64 uniform bits the number of thresholds that they reach, by bisection, counted from the farthest."""
    highs, lows = (jnp.asarray(words) for words in thresholds())

    def halve(_, state):
        place, step = state
        further = place + step
        over, under = (words.at[further - 1].get(mode="promise_in_bounds") for words in (highs, lows))
        reached = (over < high) | ((over == high) & (under <= low))
        return jnp.where(reached, further, place), step >> 1

    begin = (jnp.zeros(high.shape, jnp.int32), jnp.asarray(1 << (BISECTIONS - 1), jnp.int32))
    place, _ = jax.lax.fori_loop(0, BISECTIONS, halve, begin)
    return jnp.minimum(place, 2 * FARTHEST) - FARTHEST


@functools.cache
def thresholds() -> tuple[np.ndarray, np.ndarray]:
    r"""$\lfloor 2^{64} P(Z_0 \le z) \rfloor$ for all z but the last, as upper and lower words, filled up."""
    with decimal.localcontext(prec=60):
        one_side = [(decimal.Decimal(-z * z) / (2 * WIDTH**2)).exp() for z in range(FARTHEST + 1)]
        weights = [*reversed(one_side[1:]), *one_side]
        total, sums = sum(weights), itertools.accumulate(weights[:-1])
        found = [int(2**64 * below / total) for below in sums]
    found += [2**64 - 1] * (2**BISECTIONS - 1 - len(found))
    upper, lower = (np.array([number >> shift & 0xFFFFFFFF for number in found], np.uint32) for shift in (32, 0))
    return upper, lower
