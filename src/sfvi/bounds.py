"""Lower bounds of the log evidence to choose from."""

from typing import Literal, NamedTuple

from .errors import OptionError


class Bound(NamedTuple):
    """What is maximized.

    Attributes:
        num_draws: K, importance samples; 1 for the ELBO.
        chunk: How many of them are evaluated at a time; None for all.
        over: What is drawn K times: the latents of each unit, or all latents together.
    """

    num_draws: int = 1
    chunk: int | None = None
    over: Literal["units", "everything"] = "units"

    @property
    def draws_of_units(self) -> int:
        """K of the locally enhanced bound, else 1."""
        return self.num_draws if self.over == "units" else 1


def elbo() -> Bound:
    """The evidence lower bound."""
    return Bound()


def locally_enhanced(num_draws: int = 10, *, chunk: int | None = None) -> Bound:
    """K importance samples of each unit's latents: most of the bias of Gaussian locals goes, at the same messages.

    See `enhanced.py`. The posterior of a unit's latents is then drawn by choosing among K draws.

    Args:
        num_draws: K.
        chunk: Draws evaluated at a time: memory grows with it instead of K; None for all.
    """
    for name, value in (("num_draws", num_draws), ("chunk", chunk)):
        if value is not None or name == "num_draws":
            _check("locally_enhanced", name, value)
    return Bound(num_draws, chunk)


def importance_weighted(num_draws: int = 10) -> Bound:
    """K importance samples of all latents together (Burda et al. 2016), for SFVI with all silos and no minibatches.

    See `algorithms/importance.py`. Silos reply with K gradients and K values of their terms. One weight for all units
    hardly helps where they are many; `locally_enhanced` does.

    Args:
        num_draws: K.
    """
    _check("importance_weighted", "num_draws", num_draws)
    return Bound(num_draws, None, "everything" if num_draws > 1 else "units")


def _check(function, name, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{function}: {name} is {value!r}; give a whole number of at least 1.")
