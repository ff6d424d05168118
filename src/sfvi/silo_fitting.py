"""One silo's posterior given a published global one."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from numpyro.infer import init_to_feasible

from ._compile import on_one_thread
from ._random import as_key
from ._types import Key
from .algorithms import SFVI, Elbo, refit
from .algorithms.options import check_optimizer, check_whole
from .engines import batching
from .engines.loop import keys
from .errors import ModelError, OptionError
from .posterior import GlobalPosterior, SiloPosterior
from .run_checks import check_network_of, check_support, settle_bound


def fit_silo(
    posterior: GlobalPosterior,
    name: str,
    data: Any,
    *,
    key: Key | int,
    num_steps: int = 2000,
    start: SiloPosterior | None = None,
    optimizer: optax.GradientTransformation | None = None,
    num_samples: int = 1,
    init_loc_fn: Callable = init_to_feasible,
    unit_ids: Any = None,
    program: str | None = None,
) -> SiloPosterior:
    r"""Fit a silo's own latents to its data, given the global posterior, which stays as it is.

    For a silo that joins after training, or one whose data have changed: it needs the global posterior (a file, see
    `GlobalPosterior.load`) and sends nothing. Units that an inference network serves need no steps at all.

    Args:
        posterior: The global posterior.
        name: The silo's name.
        data: The silo's data, as its program expects them.
        key: Of all randomness.
        num_steps: Steps of each unit on $\mathrm{E}_{q(z_G)}[\mathcal{L}_j]$; with minibatches there are N / batch
            times as many in all.
        start: An earlier posterior of the same silo to go on from.
        optimizer: By default Adam with a step size that falls to zero over all steps; in a minibatched plate the
            schedule of another one counts the unit's own steps.
        num_samples: Monte Carlo samples per step.
        init_loc_fn: NumPyro strategy for where latents of the silo itself start.
        unit_ids: See `StructuredModel.silo_data`.
        program: Where every silo has a program of its own, the name of the silo whose program to use.
    """
    if not isinstance(posterior, GlobalPosterior):
        raise OptionError(f"posterior is {posterior!r}; give a GlobalPosterior, like fit.posterior.")
    if not isinstance(name, str) or not name:
        raise OptionError(f"name is {name!r}; give the silo's name.")
    check_whole("num_steps", num_steps, at_least=0)
    check_optimizer("optimizer", optimizer, optional=True)
    run_key, model, shared = as_key(key), posterior.model, posterior.shared
    silo = model.silo_data(name, data, unit_ids=unit_ids, program=program)
    unknown = sorted(set(model.initial_theta(run_key, {name: silo})) - set(shared.theta))
    if unknown:
        raise ModelError(f"The program of silo {name!r} has the parameter {unknown[0]!r}, which was not fitted.")
    check_support(shared.theta, {name: silo}, batching.plan(model, {name: silo}, shared.theta, merge=False))
    options = SFVI(
        local_family=posterior.local_family, num_samples=num_samples, bound=posterior.bound, init_loc_fn=init_loc_fn
    )
    if posterior.bound.draws_of_units > 1:
        settle_bound(options, shared.theta, {name: silo})
    check_network_of(options, name, silo)
    elbo = Elbo(options, model)
    _, silo_key = keys(run_key)
    free = elbo.start_silo(silo_key, shared, silo)
    if num_steps == 0 and start is None and jax.tree.leaves(free):
        raise OptionError(
            f"num_steps is 0, but silo {name!r} has latents that no network serves; give steps, or start= from before."
        )
    if start is not None:
        free = _continue(start, free, posterior, name)

    @on_one_thread
    def run(key, shared, free, silo):
        return refit(elbo, key, shared, free, silo, num_steps=num_steps, optimizer=optimizer)

    family = elbo.local(shared, run(silo_key, shared, free, silo), silo)
    return SiloPosterior(name, posterior, family, silo, program)


def _continue(start, free, posterior, name):
    """The earlier parameters, measured from the center of the new global posterior."""
    if not isinstance(start, SiloPosterior):
        raise OptionError(f"start is {start!r}; give a SiloPosterior, like fit.silo({name!r}).")
    before = start.free
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (before, free)]
    if shapes[0] != shapes[1]:
        raise OptionError(f"start has other units or another local family than silo {name!r} has now; leave it out.")
    return before.recentered(posterior.family.center - start.shared.family.center)
