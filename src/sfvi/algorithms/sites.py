r"""Sites: every silo owns a Gaussian factor of $q(z_G)$; a handful of exchanges instead of thousands.

$$q(z_G) = t_0(z_G) \prod_j t_j(z_G)$$

$t_0$ stands for the prior and belongs to the server, $t_j$ for $\mathcal{L}_j$ and belongs to silo $j$. In a round
every silo takes its own factor out of $q$, looks for the best Gaussian with its own term in the place of it, and
replies with the change (`tilted.py`). `docs/design.md` proves that nothing changes any more exactly where SFVI's
gradient vanishes.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from .. import _optim
from .._types import GlobalVec, Key, Scalar, Theta
from ..errors import OptionError
from ..families import MeanFieldGaussian, StructuredLocal
from ..model import SiloData, StructuredModel
from ..natural import Natural, as_gaussian, gaussian, inner_product, natural, packed, standard, standardized, unpacked
from ..objectives import Shared
from . import ascent, local_params, prior_site
from .elbo import Elbo, Latents
from .options import AbstractVariationalOptions, check_whole, refuse_importance_weighted
from .participation import Participants
from .refit import refit
from .tilted import LOOSE, Factor, Points, curvature, flat, tilted, unflatten

NUM_PROBES = 8
ADAPTATION = 0.7  # by how much, on the log scale, one round may change the damping
LEAST_DAMPING = 0.02


class ServerState(NamedTuple):
    r"""What the server keeps.

    Attributes:
        shared: $q(z_G)$ and the point estimates, made from `total`.
        total: The product of all sites.
        own: $t_0$.
        opt_state: State of the optimizer that refines $t_0$; None if there is nothing to refine.
        damping: $\rho$ of the next round.
        direction: Where the last round wanted to go, in standardized coordinates.
        first: Whether no round has been done.
        round: Number of the next round.
        num_units: Of each silo.
    """

    shared: Shared
    total: Factor
    own: Factor
    opt_state: optax.OptState | None
    damping: Scalar
    direction: Natural
    first: Bool[Array, ""]
    round: Int[Array, ""]
    num_units: Float[Array, " silos"]


class SiloState(NamedTuple):
    r"""What a silo keeps between rounds; it never leaves.

    Attributes:
        family: $\eta_{Lj}$.
        opt_state: State of its optimizer.
        shared_opt_state: State of the optimizer of $q'$ and the silo's copy of the point estimates.
        center: Mean of $q'$, from which `family` measures $z_G$.
        site: $t_j$.
    """

    family: StructuredLocal
    opt_state: local_params.LocalOptState
    shared_opt_state: optax.OptState
    center: GlobalVec
    site: Factor


class Broadcast(NamedTuple):
    r"""All that the server sends.

    Attributes:
        shared: $q(z_G)$ and the point estimates.
        points_precision: Precision of the point estimates.
        damping: $\rho$.
        sharers: How many participants may change their sites in this round.
        first: Whether this is the first round.
        num_silos: J.
        total_units: N; 0 if it is not known.
        key: To estimate the ELBO with.
        round: Number of the round.
    """

    shared: Shared
    points_precision: Float[Array, " n_points"]
    damping: Scalar
    sharers: Scalar
    first: Bool[Array, ""]
    num_silos: Scalar
    total_units: Scalar
    key: Key
    round: Int[Array, ""]


class Reply(NamedTuple):
    r"""All that a silo sends: by how much it changed its site, damping included; of matrices one half."""

    change: Factor


class SiloInfo(NamedTuple):
    r"""The silo's estimate of $\mathcal{L}_j$ before its steps; stays in the silo."""

    elbo_term: Scalar


class ServerInfo(NamedTuple):
    r"""The server's estimate of $\mathcal{L}_0$ before the round, the damping, and how far all sites wanted to go.

    `change` is about the movement of means in sds and of log sds, undamped; what is left at the end is noise.
    """

    elbo_term: Scalar
    damping: Scalar
    change: Scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sites(AbstractVariationalOptions):
    r"""Structured partitioned variational inference: SFVI's answer in tens of rounds.

    For Gaussian $q(z_G)$, mean field or full covariance. Its stationary points are those of SFVI, whatever the split
    and however silos differ; absent silos keep their site, so partial participation brings no bias either. In the
    first round every silo takes itself for a copy of the whole, as in SFVI-Avg, which is only a start; with a
    mean-field family and all silos present it foresees the others in this way in all rounds, and what is stationary
    stays so (`docs/design.md`).

    Args:
        num_local_steps: m, steps of a silo in one round. More of them cost no exchange.
        damping: $\rho$, the part of its change that a silo makes, above 0 and at most 1. By default it starts at
            $0.7 / \sqrt{J}$, grows while rounds go in the same direction and falls when they undo each other, so that
            in the end noise averages out.
        step_size: Of the default optimizer, Adam, in standard deviations of $q(z_G)$: within a round it falls to zero,
            and from round to round as $(1 + \mathrm{steps} / 1000)^{-0.75}$.
        refit_steps: Steps of the local refit after the last round; 0 for none.
        optimizer: See `algorithms.options.AbstractVariationalOptions` for this and all options not listed here. It sees
            $q'$ in coordinates standardized by $q$, and the point estimates.
    """

    num_local_steps: int = 1000
    damping: float | None = None
    step_size: float = 0.05
    refit_steps: int = 500

    def __post_init__(self):
        AbstractVariationalOptions.__post_init__(self)
        refuse_importance_weighted("Sites", self.bound)
        if self.privacy is not None:
            raise OptionError("Sites: privacy is not there for it; use SFVI.")
        check_whole("num_local_steps", self.num_local_steps, at_least=1)
        for name, value, optional in (("damping", self.damping, True), ("step_size", self.step_size, False)):
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise OptionError(f"{name} is {value!r}; give a number above 0 and at most 1.")

    @property
    def usual_rounds(self) -> int:
        """Rounds that mostly suffice."""
        return 40

    def stages(self) -> list[tuple[AbstractVariationalOptions, int | None]]:
        """Itself only, for as many rounds as the user gives."""
        return [(self, None)]

    def bind(self, model: StructuredModel) -> "BoundSites":
        """Make the functions of the protocol for a model."""
        _ = model.population.curvature  # found out now, with numbers; later there are only tracers
        return BoundSites(Elbo(self, model), self.num_local_steps, self.damping, self.step_size)


class BoundSites(NamedTuple):
    """The functions of Sites for one model."""

    elbo: Elbo
    steps_per_round: int
    damping: float | None
    step_size: float

    @property
    def options(self) -> AbstractVariationalOptions:
        """What the user chose."""
        return self.elbo.options

    @property
    def additive(self) -> bool:
        """False: every silo has a copy of its own of what is shared."""
        return False

    @property
    def accumulates(self) -> bool:
        """True: replies are changes of sites."""
        return True

    @property
    def combines(self) -> Literal["sum"]:
        """All that is needed of the changes is their sum."""
        return "sum"

    def server_init(self, key: Key, theta: Theta, num_units: Float[Array, " silos"]) -> ServerState:
        r"""Start $q(z_G)$ and $\theta$."""
        return self._start_server(self.elbo.start_shared(key, theta), num_units, first=True)

    def server_start(self, shared: Shared, num_units: Float[Array, " silos"]) -> ServerState:
        """Start from given parameters: they are right as they are but for the silos' shares in them."""
        return self._start_server(shared, num_units, first=False)

    def silo_init(self, key: Key, broadcast: Broadcast, data: SiloData) -> SiloState:
        r"""Start $\eta_{Lj}$ at the same point for every unit, and the site as the silo's share of $q / t_0$."""
        return self.silo_start(self.elbo.start_silo(key, broadcast.shared, data), broadcast, data)

    def silo_start(self, family: StructuredLocal, broadcast: Broadcast, data: SiloData) -> SiloState:
        """Start from given parameters, measured from the center of the broadcast."""
        shared = broadcast.shared
        others = _start_total(shared).plus(prior_site.start(self.elbo, shared), -1.0)
        optimizer, own_optimizer = self._optimizers(jnp.zeros((), jnp.int32))
        return SiloState(
            family,
            local_params.init(own_optimizer, family, data),
            _optim.init(optimizer, (standard(as_gaussian(shared.family)), _points(shared))),
            shared.family.center,
            others.times(_share(broadcast, data)),
        )

    def participants(self, key: Key, state: ServerState) -> Participants:
        """Draw who takes part in this round."""
        return self.options.participation.draw(key, state.round, state.num_units.shape[0])

    def broadcast(self, key: Key, state: ServerState) -> Broadcast:
        """Send $q$ and what silos must know of each other."""
        dtype = state.damping.dtype
        units = state.num_units.astype(dtype)
        sharers = self.participants(key, state).index.shape[0] + (state.opt_state is not None)
        return Broadcast(
            state.shared,
            state.total.points.precision,
            jnp.where(state.first, 1.0, state.damping).astype(dtype),
            jnp.asarray(sharers, dtype),
            state.first,
            jnp.asarray(units.shape[0], dtype),
            jnp.where(jnp.all(units > 0), jnp.sum(units), 0.0),
            jax.random.fold_in(key, state.round),
            state.round,
        )

    def silo_step(
        self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData
    ) -> tuple[SiloState, Reply, SiloInfo]:
        """Take m steps against the cavity, then move the site by the damped difference."""
        state, problem = self._start(state, broadcast, data)
        draw = ascent.common_draw(self.elbo, key, broadcast, data, self.steps_per_round)

        def term(shared):
            return ascent.at_draw(self.elbo, shared, state.family, draw, data)

        floor = LOOSE * _share(broadcast, data)
        bend = curvature(term, broadcast.shared, broadcast.key, num_probes=NUM_PROBES, floor=floor)
        elbo_term = ascent.estimate(self.elbo, key, broadcast, state.family, data, self.steps_per_round)

        def step(carry, number):
            return self._step(key, carry, number, problem, data)[0], None

        start = (state, problem.start, _points(broadcast.shared))
        numbers = broadcast.round * self.steps_per_round + jnp.arange(self.steps_per_round)
        (state, inner, points), _ = jax.lax.scan(step, start, numbers)
        change = problem.change(inner, points, bend, broadcast.sharers, broadcast.damping)
        state = state._replace(center=problem.family(inner).center, site=state.site.plus(change))
        return state, Reply(change._replace(latents=packed(change.latents))), SiloInfo(elbo_term)

    def server_step(
        self, state: ServerState, broadcast: Broadcast, replies: Reply, participants: Participants
    ) -> tuple[ServerState, ServerInfo]:
        r"""Add the changes of those who took part, refine $t_0$, and choose the next damping."""
        noise = self.elbo.global_noise(broadcast.key, state.shared, ascent.num_evaluations(self.steps_per_round))
        value = self.elbo.server(state.shared, noise)
        present = participants.weight > 0
        change = jax.tree.map(lambda leaf: jnp.tensordot(present.astype(leaf.dtype), leaf, 1), replies.change)
        change = change._replace(latents=unpacked(change.latents, state.total.latents))
        mine, opt_state = self._refine(state, broadcast)
        total, own = state.total.plus(change).plus(mine), state.own.plus(mine)
        points = unflatten(total.points.shift / total.points.precision, state.shared)
        fresh = prior_site.exact(self.elbo, Shared(state.shared.family, *points))
        if fresh is not None:  # a Gaussian prior follows its parameters at once
            others = total.latents.plus(own.latents, -1.0)
            own = own._replace(latents=fresh.latents)
            total = total._replace(latents=others.plus(fresh.latents))
        shared = Shared(gaussian(total.latents), *points)
        damping, direction, size = self._adapt(state, broadcast, change.plus(mine).latents)
        following = ServerState(
            shared, total, own, opt_state, damping, direction, jnp.asarray(False), state.round + 1, state.num_units
        )
        return following, ServerInfo(value, broadcast.damping, size)

    def silent(self, broadcast: Broadcast) -> Reply:
        """A change of nothing."""
        total = _start_total(broadcast.shared).times(0.0)
        return Reply(total._replace(latents=packed(total.latents)))

    def silo_finish(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> StructuredLocal:
        r"""The silo's $q(z_{Lj} \mid z_G)$ under the final parameters, refitted to them."""
        state, _ = self._start(state, broadcast, data)
        return refit(self.elbo, key, broadcast.shared, state.family, data, num_steps=self.options.refit_steps)

    def latents(self, key: Key, state: SiloState, broadcast: Broadcast, data: SiloData) -> Latents:
        """The draw of the first local step that is not finite, or else of the last one."""
        state, problem = self._start(state, broadcast, data)

        def step(carry, number):
            return self._step(key, carry, number, problem, data)

        start = (state, problem.start, _points(broadcast.shared))
        first = broadcast.round * self.steps_per_round
        number, (silo, inner, points) = ascent.before_break(step, start, first, self.steps_per_round)
        shared = Shared(problem.family(inner), *points)
        return self.elbo.latents(shared, silo.family, ascent.own_draw(self.elbo, key, shared, number, data), data)

    def remarks(self, trace: dict) -> list[str]:
        """Nothing to say about the rounds done."""
        del trace
        return []

    def _start_server(self, shared, num_units, *, first):
        total, own = _start_total(shared), prior_site.start(self.elbo, shared)
        opt_state = None
        if prior_site.is_refined(self.elbo, shared):
            optimizer, _ = self._optimizers(jnp.zeros((), jnp.int32))
            opt_state = _optim.init(optimizer, (standard(as_gaussian(shared.family)), _points(shared)))
        damping = min(1.0, 0.7 / num_units.shape[0] ** 0.5) if self.damping is None else self.damping
        nowhere = jax.tree.map(jnp.zeros_like, total.latents)
        damping = jnp.asarray(damping, shared.family.center.dtype)
        start = jnp.zeros((), jnp.int32)
        return ServerState(shared, total, own, opt_state, damping, nowhere, jnp.asarray(first), start, num_units)

    def _start(self, state, broadcast, data):
        """The silo's state, measured from the broadcast, and its problem in this round."""
        family = broadcast.shared.family
        everyone = not self.options.participation.partial  # others that are absent need not be foreseen
        foresee = broadcast.first | (isinstance(family, MeanFieldGaussian) and everyone)
        copies = jnp.where(foresee, 1.0 / _share(broadcast, data), 1.0)
        problem = tilted(broadcast.shared, broadcast.points_precision, state.site, copies, broadcast.first)
        return state._replace(family=state.family.recentered(family.center - state.center)), problem

    def _step(self, key, carry, number, problem, data):
        state, inner, points = carry
        draw = ascent.own_draw(self.elbo, key, Shared(inner, *points), number, data)

        def objective(inner, points, rows):
            def term(shared):
                return self.elbo.silo(shared, rows, draw, data)

            return problem.objective(self.elbo, inner, points, draw.noise, term)

        rows = local_params.select(state.family, draw.indices)
        value, (*gradient, local) = jax.value_and_grad(objective, argnums=(0, 1, 2))(inner, points, rows)
        optimizer, own_optimizer = self._optimizers(number)
        (inner, points), shared_state = _optim.ascend(
            optimizer, tuple(gradient), state.shared_opt_state, (inner, points)
        )
        family, opt_state = local_params.ascend(own_optimizer, state.family, state.opt_state, local, draw.indices)
        state = state._replace(family=family, opt_state=opt_state, shared_opt_state=shared_state)
        return (state, inner, points), value

    def _refine(self, state, broadcast):
        r"""The server's own change: of $t_0$ if the prior is not Gaussian, and of $\theta$ if it has parameters."""
        nothing = jax.tree.map(jnp.zeros_like, state.own)
        if state.opt_state is None:
            return nothing, None
        one = jnp.ones((), state.damping.dtype)
        problem = tilted(state.shared, state.total.points.precision, state.own, one, jnp.asarray(False))

        def step(carry, number):
            inner, points, opt_state = carry
            noise = self.elbo.global_noise(jax.random.fold_in(broadcast.key, number), state.shared, 1)

            def objective(inner, points):
                return problem.objective(
                    self.elbo, inner, points, noise, lambda shared: prior_site.term(self.elbo, shared, noise)
                )

            gradient = jax.grad(objective, argnums=(0, 1))(inner, points)
            optimizer, _ = self._optimizers(number)
            moved, opt_state = _optim.ascend(optimizer, gradient, opt_state, (inner, points))
            return (*moved, opt_state), None

        noise = self.elbo.global_noise(broadcast.key, state.shared, ascent.num_evaluations(self.steps_per_round))
        bend = curvature(
            lambda shared: prior_site.term(self.elbo, shared, noise),
            state.shared,
            broadcast.key,
            num_probes=NUM_PROBES,
            floor=0.0,
        )
        numbers = state.round * self.steps_per_round + jnp.arange(self.steps_per_round)
        start = (problem.start, _points(state.shared), state.opt_state)
        (inner, points, opt_state), _ = jax.lax.scan(step, start, numbers)
        change = problem.change(inner, points, bend, broadcast.sharers, broadcast.damping)
        if prior_site.is_exact(self.elbo, state.shared):
            change = change._replace(latents=nothing.latents)
        keep = state.first  # the silos only find their feet
        change = jax.tree.map(lambda new: jnp.where(keep, 0.0, new), change)
        return change, opt_state

    def _adapt(self, state, broadcast, change):
        """The next damping, from how well the direction of this round agrees with that of the last."""
        direction = standardized(change.times(1.0 / broadcast.damping), as_gaussian(state.shared.family))
        size, before = (jnp.sqrt(inner_product(d, d)) for d in (direction, state.direction))
        damping = state.damping
        if self.damping is None:
            cosine = inner_product(direction, state.direction) / jnp.maximum(size * before, 1e-30)
            adapted = jnp.clip(damping * jnp.exp(ADAPTATION * cosine), LEAST_DAMPING, 1.0)
            damping = jnp.where(state.first, damping, adapted)
        direction = jax.tree.map(lambda leaf: jnp.where(state.first, 0.0, leaf), direction)
        return damping, direction, size

    def _optimizers(self, number):
        """Those of what is shared and of the silo's own parameters, at a local step."""
        given, own = self.options.optimizer, self.options.local_optimizer
        if given is None:
            within = (number % self.steps_per_round) / self.steps_per_round
            size = self.step_size * 0.5 * (1.0 + jnp.cos(jnp.pi * within)) * (1.0 + number / 1000.0) ** -0.75
            given = optax.adam(size)
        return given, own or given


def _points(shared: Shared) -> Points:
    return (shared.theta, shared.network)


def _start_total(shared):
    """The product of all sites before the first round; point estimates are held loosely."""
    points = flat(_points(shared), shared.family.center.dtype)
    return Factor(natural(as_gaussian(shared.family)), Natural(jnp.ones_like(points), points))


def _share(broadcast, data):
    """The silo's part of all units; all are equal if these cannot be counted."""
    known = broadcast.total_units > 0
    share = data.num_units.astype(broadcast.total_units.dtype) / jnp.where(known, broadcast.total_units, 1.0)
    return jnp.where(known, share, 1.0 / broadcast.num_silos)
