r"""Differential privacy as an option: who is protected, and by how much noise.

Both add noise in the silo, to its reply, before it leaves. What stays in the silo ($\eta_L$) gets none.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Self, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from .._types import Key
from ..accountant import LEAST_NOISE, MOST_DELTA, MOST_NOISE, Releases, noise_for, spent
from ..errors import OptionError
from ..model import SiloData
from .grid import SPREAD, Grid, Whole

Tree = TypeVar("Tree")
LEAST_CLIP, MOST_CLIP = 1e-9, 1e9  # beyond, norms in single precision are lost, and vectors not shortened
LEAST_RATE = 1e-6  # units are drawn by 32 bits
DROWNED = 1.0  # posterior sds; with more noise than that steps are too small to arrive (`under_noise.average`)
SECRET = 0x5EC2E7  # what follows from a silo's key for noise follows from nothing else


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractPrivacy:
    r"""Noise of standard deviation $\sigma C$ on a sum to which each of those protected adds at most norm $C$.

    Args:
        clip: $C$.
        epsilon: To be spent in all rounds together; $\sigma$ follows from it and the number of rounds.
        noise_multiplier: $\sigma$, instead of `epsilon`; 0 for no noise and no promise.
        delta: The probability with which the promise may fail: well below one over the number of those protected.
        shared_by: How many silos make the noise together, each $1 / \sqrt{n}$ of it. Only their sum is then protected,
            so it takes a secure sum of at least so many silos, and all of them must be honest.
    """

    clip: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    shared_by: int = 1

    def __post_init__(self):
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise OptionError(f"{type(self).__name__}: give one of epsilon and noise_multiplier.")
        noise = self.noise_multiplier
        silent = _is_number(noise) and noise == 0
        if noise is not None and not silent:
            fine = _is_number(noise) and LEAST_NOISE <= noise <= MOST_NOISE
            self._check("noise_multiplier", fine, f"0, or a number between {LEAST_NOISE:g} and {MOST_NOISE:g}")
        clip, most = self.clip, math.inf if silent else MOST_CLIP
        fine = _is_number(clip) and LEAST_CLIP <= clip <= most
        self._check("clip", fine, f"a number between {LEAST_CLIP:g} and {most:g}")
        if self.epsilon is not None:
            fine = _is_number(self.epsilon) and 0 < self.epsilon < math.inf
            self._check("epsilon", fine, "a number above 0")
        fine = _is_number(self.delta) and 0 < self.delta <= MOST_DELTA
        self._check("delta", fine, f"a number above 0 and at most {MOST_DELTA:g}, like 1e-5")
        whole = _is_number(self.shared_by) and isinstance(self.shared_by, int) and self.shared_by >= 1
        self._check("shared_by", whole, "a whole number of at least 1")

    def _check(self, name, fine, wanted):
        if not fine:
            value = getattr(self, name)
            plain = value is None or isinstance(value, str | int | float)
            shown = repr(value) if plain else f"of type {type(value).__name__}"
            raise OptionError(f"{type(self).__name__}: {name} is {shown[:100]}; give {wanted}.")

    @property
    def rate(self) -> float:
        """The probability with which one of those protected takes part in a round."""
        return 1.0

    @property
    def noise(self) -> float:
        r"""$\sigma$, once it is known."""
        if self.noise_multiplier is None:
            raise OptionError(
                f"{type(self).__name__}: epsilon needs a number of rounds that is known beforehand; leave "
                "until_converged out, or give noise_multiplier."
            )
        return self.noise_multiplier

    def planned(self, num_rounds: int) -> Self:
        r"""With the $\sigma$ for so many rounds."""
        if self.epsilon is None:
            return self
        noise = noise_for(self.epsilon, self.delta, count=num_rounds, sampling_rate=self.rate)
        return dataclasses.replace(self, epsilon=None, noise_multiplier=noise)

    def releases(self, count: int) -> Releases:
        """So many rounds, for the accountant."""
        return Releases(self.noise, self.rate, count)

    def releases_of_units(self, count: int) -> Releases:
        """The same, of what they tell about a unit."""
        return self.releases(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitPrivacy(AbstractPrivacy):
    r"""Protects every unit: a child, a patient, a document, with all its rows.

    The gradient of each unit's part of $\mathcal{L}_j$, in $(\eta_G, \theta, \phi)$ and in the parameters of the
    silo's own latents, measured in posterior sds (`measure.py`), is shortened to norm $C$; to their sum noise is added.
    `usual_clip` shortens few; a clip that shortens many biases the result, which a trial with `noise_multiplier=0`
    shows. Units take part in a round with probability q each
    (Poisson sampling), chosen by the silo in secret, and their sum is divided by q. If no `optimizer` is given and the
    number of rounds is known, $\eta_G$ and the silos' own latents move by steps that average over noise
    (`under_noise.py`).

    Args:
        sampling_rate: q; 1 for all units in every round.
        clip: See `AbstractPrivacy` for this and all others.
    """

    sampling_rate: float = 1.0

    def __post_init__(self):
        AbstractPrivacy.__post_init__(self)
        rate = self.sampling_rate
        fine = _is_number(rate) and LEAST_RATE <= rate <= 1
        self._check("sampling_rate", fine, f"a number between {LEAST_RATE:g} and 1")

    @property
    def rate(self) -> float:
        """As given."""
        return float(self.sampling_rate)

    @staticmethod
    def usual_clip(*, num_units: int, num_latents: int, mean_field: bool = False) -> float:
        r"""A clip that shortens few: $5 \sqrt{d (d + 3) / 2 n}$, and $7 \sqrt{d / n}$ where $q(z_G)$ is a mean field.

        Args:
            num_units: n, of all silos together, about.
            num_latents: d: numbers of $z_G$, of $\theta$, and of silos' own latents.
            mean_field: Whether $q(z_G)$ is `families.mean_field()`; by default its covariance is full.
        """
        for option, value in (("num_units", num_units), ("num_latents", num_latents)):
            if not (_is_number(value) and isinstance(value, int) and value >= 1):
                raise OptionError(f"usual_clip: {option} is {value!r}; give a whole number of at least 1.")
        if mean_field:
            return 7 * math.sqrt(num_latents / num_units)
        return 5 * math.sqrt(num_latents * (num_latents + 3) / (2 * num_units))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiloPrivacy(AbstractPrivacy):
    r"""Protects a silo as a whole, all its data together: whether it took part at all.

    The difference between its reply and that of a silo with nothing to say is shortened to norm $C$, and noise is
    added. Useful with many silos only: each adds all of the noise.
    """

    def releases_of_units(self, count: int) -> Releases:
        """A unit more or less can turn the shortened difference around: it moves by twice the clip."""
        return Releases(self.noise / 2, self.rate, count)


Privacy = UnitPrivacy | SiloPrivacy


class Spent(NamedTuple):
    r"""What a fit has cost those whom it protects.

    Attributes:
        protects: "unit" or "silo".
        epsilon: $\epsilon$.
        delta: $\delta$.
        clip: $C$.
        noise_multiplier: $\sigma$.
        sampling_rate: $q$.
        rounds: How many replies of a silo.
        shared_by: How many silos made the noise together.
        left: What is left of the noise in the means, in posterior sds, about (`under_noise.average`); None if that is
            not known, or the run broke off.
    """

    protects: Literal["unit", "silo"]
    epsilon: float
    delta: float
    clip: float
    noise_multiplier: float
    sampling_rate: float
    rounds: int
    shared_by: int = 1
    left: float | None = None

    @classmethod
    def of(cls, privacy: Privacy, rounds: int, left: float | None = None) -> "Spent":
        """After so many rounds, which leave so much of the noise in the means."""
        protects: Any = "unit" if isinstance(privacy, UnitPrivacy) else "silo"
        epsilon = spent([privacy.releases(rounds)], privacy.delta)
        about = (privacy.delta, privacy.clip, privacy.noise, privacy.rate, rounds, privacy.shared_by)
        return cls(protects, epsilon, *about, left)

    def __str__(self):
        if math.isinf(self.epsilon):
            return f"No differential privacy: what {self.rounds:,} replies of a silo said had no noise."
        what = "What left a silo" if self.shared_by == 1 else f"The sum of what left at least {self.shared_by} silos"
        said = (
            f"{what} is ({self.epsilon:.3g}, {self.delta:g})-differentially private for each {self.protects} "
            f"({self.rounds:,} replies, noise {self.noise_multiplier:.3g} times the largest contribution)."
        )
        return said if self.left is None else f"{said} {noise_in_words(self.left)}"


def noise_in_words(left: float) -> str:
    """A sentence about what a run leaves of its noise, in posterior sds."""
    if left <= DROWNED:
        return (
            f"The noise alone leaves an error of about {left:.2g} posterior sds in the means; too few rounds, and a "
            "clip that shortens many, come on top."
        )
    return (
        f"The noise is about {left:.2g} posterior sds in the means, even as an average over all rounds, and too loud "
        "for sds to get far from init_scale: means may be much farther off, and a variance component may be lost."
    )


def check_privacy(chosen: Any) -> None:
    """Refuse what is no privacy."""
    if not isinstance(chosen, Privacy | None):
        raise OptionError(f"privacy is {chosen!r}; give UnitPrivacy(epsilon=1.0, clip=1.0) or SiloPrivacy(...).")


def shortened(vector: Float[Array, " n"], clip: float) -> Float[Array, " n"]:
    """A vector, of norm `clip` at most; zero if it is not finite, so that nobody can stand out by breaking."""
    norm = jnp.linalg.norm(vector)
    factor = jnp.minimum(1.0, clip / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jnp.where(jnp.isfinite(norm), vector * factor, 0.0)


def summand(privacy: AbstractPrivacy, vector: Float[Array, " n"]) -> Float[Array, " n"] | Whole:
    """What one of those protected adds to a sum; on the grid of the noise, if there is any."""
    short, grid = shortened(vector, privacy.clip), _grid(privacy)
    return short if grid is None else grid.summand(short)


def noisy(
    privacy: AbstractPrivacy, secret: Key, total: Float[Array, " n"] | Whole, dtype: jnp.dtype
) -> Float[Array, " n"]:
    r"""Add noise of standard deviation $\sigma C$, or the silo's share of it, to a sum of summands."""
    grid = _grid(privacy)
    if isinstance(total, Whole):
        assert grid is not None
        return grid.noisy(secret, total, dtype)
    assert grid is None
    return total


def _grid(privacy):
    size = privacy.noise * privacy.clip / math.sqrt(privacy.shared_by)
    return Grid(size / SPREAD, privacy.clip) if size > 0 else None


def secret_key(key: Key, round: Int[Array, ""], data: SiloData) -> Key:
    """The key of a silo's noise in a round: of nothing else, and of no other silo."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, SECRET), data.silo_word), round)


def released(privacy: Any, secret: Key, reply: Tree, silent: Tree) -> Tree:
    """A silo's reply as it may leave where the silo as a whole is protected; as it is otherwise."""
    if not isinstance(privacy, SiloPrivacy):
        return reply
    said, rebuild = ravel_pytree(jax.tree.map(jnp.subtract, reply, silent))
    return jax.tree.map(jnp.add, silent, rebuild(noisy(privacy, secret, summand(privacy, said), said.dtype)))


def _is_number(value: Any) -> TypeGuard[float]:
    """A plain one: no truth value, no text, no array, and no whole number that is too large to compute with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < 2**63
