"""Options that all algorithms share, and their checks."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import optax
from numpyro.infer import init_to_feasible

from .. import _optim, families
from ..bounds import Bound
from ..errors import OptionError, first_line
from ..families import AbstractGlobalFamily
from ..objectives import Estimator, freezer
from .participation import Everyone, Participation
from .privacy import Privacy, check_privacy

CHOOSERS = (
    families.full,
    families.mean_field,
    families.low_rank,
    families.flow,
    families.block,
    families.amortized,
)


STEP_SIZE = 0.03


def slow_decay(step):
    """The step size of runs whose end is not known, 0.02 / (1 + step / 1000)^0.75: large at first."""
    return 0.02 * (1.0 + step / 1000.0) ** -0.75


def falling_to_zero(num_steps: int) -> optax.Schedule:
    """The step size of runs whose end is known: half a cosine, so that nothing is left of the noise of single steps."""
    return optax.cosine_decay_schedule(STEP_SIZE, num_steps)


DEFAULT_OPTIMIZER = optax.adam(slow_decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractVariationalOptions:
    r"""What a user chooses about families, estimators and optimizers.

    Args:
        optimizer: Optax optimizer of $\eta_G$, $\theta$ and $\phi$, which it sees as one tree. By default Adam; in SFVI
            its step size falls to zero in the last round if that is known, else it is `slow_decay`.
        local_optimizer: Optimizer of $\eta_L$ in the silos; the same as `optimizer` if None. In a minibatched
            plate every unit has its own state, so a schedule there counts the unit's own updates.
        global_family: $q(z_G)$: `families.mean_field()`, `full()`, `low_rank()` or `flow()`. By default full up to
            200 dimensions and mean field beyond.
        local_family: $q(z_L \mid z_G)$: `families.block(...)` or `families.amortized(...)`.
        bound: `bounds.elbo()`, `locally_enhanced(num_draws=10)` or, for SFVI, `importance_weighted(num_draws=10)`. By
            default `sfvi.fit` chooses the second if units have free latents and depend on their own only, and else
            the ELBO.
        num_samples: Monte Carlo samples per step.
        estimator: "stl" (default) or "reparameterization".
        init_loc_fn: NumPyro strategy for the initial mean of the global latents, and of silos' latents outside all
            plates of units, if they are as written (see `centring`); the others start at zero in unconstrained
            space.
        init_scale: Initial standard deviation of every latent in unconstrained space.
        participation: Who takes part in a round: `participation.everyone()` (default), `fraction(...)`, `count(...)`
            or `rule(...)`.
        refit_steps: Steps of each unit in the local refit after the last round, see `refit`; 0 for none.
        privacy: Differential privacy of what leaves a silo: `UnitPrivacy(...)` under SFVI, or `SiloPrivacy(...)` under
            SFVI and SFVI-Avg.
    """

    optimizer: optax.GradientTransformation | None = None
    local_optimizer: optax.GradientTransformation | None = None
    global_family: Callable[..., AbstractGlobalFamily] | None = None
    local_family: Callable[..., Any] = dataclasses.field(default_factory=families.block)
    bound: Bound | None = None
    num_samples: int = 1
    estimator: Estimator = "stl"
    init_loc_fn: Callable = init_to_feasible
    init_scale: float = 0.1
    participation: Participation = dataclasses.field(default_factory=Everyone)
    refit_steps: int = 0
    privacy: Privacy | None = None

    def __post_init__(self):
        freezer(self.estimator)
        for name in ("optimizer", "local_optimizer"):
            check_optimizer(name, getattr(self, name), optional=True)
        for name, example in (("global_family", "full"), ("local_family", "block")):
            chosen = getattr(self, name)
            if chosen in CHOOSERS or not (callable(chosen) or (chosen is None and name == "global_family")):
                raise OptionError(f"{name} is {chosen!r}; give what families.{example}() returns, or another family.")
        if not isinstance(self.bound, Bound | None):
            raise OptionError(f"bound is {self.bound!r}; give bounds.elbo() or bounds.locally_enhanced(...).")
        check_whole("num_samples", self.num_samples, at_least=1)
        check_whole("refit_steps", self.refit_steps, at_least=0)
        check_privacy(self.privacy)
        if not isinstance(self.init_scale, int | float) or not 0 < self.init_scale < float("inf"):
            raise OptionError(f"init_scale is {self.init_scale!r}; give a positive number.")
        if not callable(self.init_loc_fn):
            raise OptionError(f"init_loc_fn is {self.init_loc_fn!r}; give a NumPyro strategy, like init_to_feasible.")
        if isinstance(self.participation, type) or not isinstance(self.participation, Participation):
            raise OptionError(
                f"participation is {self.participation!r}; give what sfvi.participation.fraction(0.2), count(10) or "
                "rule(...) returns."
            )

    def planned(self, num_rounds: int) -> Self:
        """The options for a run of so many rounds and no fewer: with the noise that its privacy asks for."""
        if self.privacy is None:
            return self
        return dataclasses.replace(self, privacy=self.privacy.planned(num_rounds))

    @property
    def shared_optimizer(self) -> optax.GradientTransformation:
        r"""The optimizer of what is shared."""
        return self.optimizer or DEFAULT_OPTIMIZER

    @property
    def own_optimizer(self) -> optax.GradientTransformation:
        r"""The optimizer of $\eta_L$."""
        return self.local_optimizer or self.shared_optimizer


def refuse_importance_weighted(algorithm: str, bound: Bound | None) -> None:
    """Refuse the bound that couples all silos."""
    if bound is not None and bound.over == "everything":
        raise OptionError(f"{algorithm}: bounds.importance_weighted() needs SFVI; use bounds.locally_enhanced().")


def check_whole(name: str, value: Any, *, at_least: int) -> None:
    """Refuse what is not a whole number in range."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise OptionError(f"{name} is {value!r}; give a whole number of at least {at_least}.")


def check_optimizer(name: str, chosen: Any, *, optional: bool) -> None:
    """Refuse what is not an optax optimizer that gets by with gradients."""
    if chosen is None and optional:
        return
    if not isinstance(chosen, optax.GradientTransformation):
        raise OptionError(f"{name} is {chosen!r}; give an optax optimizer, like optax.adam(1e-2).")
    try:
        _optim.is_elementwise(chosen)
    except TypeError as error:
        raise OptionError(
            f"{name} needs more than gradients ({first_line(error)}); choose another optax optimizer."
        ) from error
