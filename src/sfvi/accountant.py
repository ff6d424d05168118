r"""How much privacy noisy releases cost, by Rényi differential privacy.

A release adds Gaussian noise of standard deviation $\sigma C$ to a sum to which whoever is protected adds at most a
vector of norm $C$, and takes part with probability $q$, independently each time. Releases add up in Rényi divergence,
also when later ones depend on earlier ones; `dp-accounting` turns the total into $(\epsilon, \delta)$. Neighbours are
data with and without one of those protected.
"""

import functools
import logging
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from .errors import OptionError

ORDERS = (*(1 + k / 10 for k in range(1, 100)), *range(11, 64), 72, 80, 96, 128, 192, 256, 512, 1024)
WHOLE_ORDERS = (*range(2, 33), 36, 40, 44, 48, 56, 64, 80, 96, 128, 192, 256)  # of sampled releases: others are slow
LEAST_NOISE, MOST_NOISE = 0.01, 1e6
MOST_DELTA = 0.01  # a promise that fails more often is none


class Releases(NamedTuple):
    r"""Releases of one kind.

    Attributes:
        noise_multiplier: $\sigma$.
        sampling_rate: $q$.
        count: How many.
    """

    noise_multiplier: float
    sampling_rate: float
    count: int


def spent(releases: Iterable[Releases], delta: float) -> float:
    r"""The $\epsilon$ of releases together; infinite if one of them has no noise, or hardly any."""
    used = [each for each in releases if each.count > 0]
    if not used:
        return 0.0
    if not all(each.noise_multiplier >= LEAST_NOISE for each in used):  # below, the library's figures are not sound
        return math.inf
    sampled = any(each.sampling_rate < 1 for each in used)
    accountant = _library().rdp.RdpAccountant(list(WHOLE_ORDERS if sampled else ORDERS))
    for each in used:
        accountant.compose(_event(each), each.count)
    total = float(accountant.get_epsilon(delta))
    return max(0.0, total) if math.isfinite(total) else math.inf  # not a number: nothing is promised


@functools.lru_cache(maxsize=64)
def noise_for(epsilon: float, delta: float, *, count: int, sampling_rate: float) -> float:
    r"""The least $\sigma$ with which so many releases cost at most $\epsilon$.

    Args:
        epsilon: To be spent.
        delta: The probability with which the promise may fail.
        count: How many releases.
        sampling_rate: $q$.
    """

    def enough(noise):
        return spent([Releases(noise, sampling_rate, count)], delta) <= epsilon

    low, high = 0.0, 1.0
    while not enough(high):
        low, high = high, 2 * high
        if high > MOST_NOISE:
            least = spent([Releases(low, sampling_rate, count)], delta)
            raise OptionError(
                f"epsilon is {epsilon!r}: at delta {delta:g} the accountant cannot show that {count:,} releases cost "
                f"less than about {least:.2g}, whatever the noise (up to {MOST_NOISE:g}); give more epsilon."
            )
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _event(releases):
    library = _library()
    gaussian = library.GaussianDpEvent(releases.noise_multiplier)
    if releases.sampling_rate >= 1:
        return gaussian
    return library.PoissonSampledDpEvent(releases.sampling_rate, gaussian)


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise OptionError("privacy needs dp-accounting; install sfvi[privacy].") from error
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of orders that it then leaves out
    return dp_accounting
