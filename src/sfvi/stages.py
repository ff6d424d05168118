"""The algorithms of one fit, run one after the other: prepared and checked together, handing parameters on."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from ._types import Key, Theta
from .algorithms import AlgorithmOptions, FederatedAlgorithm, UnitPrivacy
from .engines import batching, in_process, loop
from .engines.checkpoint import Checkpoint
from .errors import OptionError
from .families import StructuredLocal
from .model import SiloData, StructuredModel
from .objectives import Shared
from .results import Fit
from .run_checks import check_batched_inputs, check_participation

STREAM = 2  # keys 0 and 1 are those of the server and the silos, see `loop.keys`


class Parameters(NamedTuple):
    """Where a stage begins."""

    shared: Shared
    families: Mapping[str, StructuredLocal]


class Stage(NamedTuple):
    """One algorithm's part of a fit; families and outcome come after it.

    Attributes:
        bound: The algorithm.
        batches: How silos are computed together.
        loop: The compiled rounds.
        key: Of all randomness.
        num_rounds: Rounds.
        suffix: Of the file with its checkpoint.
        families: Each silo's local family at the end.
        outcome: Where it ended.
    """

    bound: FederatedAlgorithm
    batches: list[batching.Batch]
    loop: loop.Loop
    key: Key
    num_rounds: int
    suffix: str
    families: dict[str, StructuredLocal]
    outcome: in_process.Outcome | None

    @property
    def is_main(self) -> bool:
        """Whether its outcome is the result; others come before, to find a start, or after, to find an error."""
        return not self.suffix

    def start(self, theta: Theta, parameters: Parameters | None) -> loop.State:
        """The state before the first round, from scratch or from given parameters."""
        if parameters is None:
            return self.loop.init(self.key, theta)
        families = tuple(batching.batch_family(batch, parameters.families) for batch in self.batches)
        return self.loop.adopt(self.key, parameters.shared, families)

    def finish(self, outcome: in_process.Outcome) -> "Stage":
        """Take each silo's local family; after a failure as it is, without a refit."""
        rounds = self.loop
        if outcome.failed_round is not None:
            bound: Any = self.bound
            options = dataclasses.replace(bound.elbo.options, refit_steps=0)
            rounds = dataclasses.replace(rounds, algorithm=bound._replace(elbo=bound.elbo._replace(options=options)))
        families = {}
        for batch, family in zip(self.batches, rounds.finish(self.key, outcome.state), strict=True):
            families |= batching.local_families(batch, family)
        return self._replace(families=families, outcome=outcome)

    def handed_on(self) -> Parameters:
        """Where the next stage begins."""
        assert self.outcome is not None
        return Parameters(self.outcome.state.server.shared, self.families)


class Part(NamedTuple):
    """One algorithm's part of a run, before it meets any data.

    Attributes:
        options: The algorithm's, planned for its rounds.
        key: Of all randomness.
        num_rounds: Rounds.
        suffix: Of the file with its checkpoint; empty for the main part.
    """

    options: AlgorithmOptions
    key: Key
    num_rounds: int
    suffix: str


def schedule(options: AlgorithmOptions, key: Key, num_rounds: int, *, ends: bool) -> list[Part]:
    """The algorithms to run one after the other; `ends` says that no rule stops the main one earlier."""
    _check_privacy(options, ends=ends)
    chosen = options.stages()
    main = next(position for position, (_, rounds) in enumerate(chosen) if rounds is None)
    parts = []
    for position, (each, rounds) in enumerate(chosen):
        suffix = "" if position == main else f".start{position}" if position < main else f".replicate{position - main}"
        part_key = key if position == main else jax.random.fold_in(key, STREAM + position)
        rounds, last = (num_rounds, ends) if rounds is None else (rounds, True)
        parts.append(Part(each.planned(rounds) if last else each, part_key, rounds, suffix))
    return parts


def _check_privacy(options: Any, *, ends):
    if options.privacy is not None and not ends:
        raise OptionError(
            "privacy: the stopping rule looks at the ELBO, which has no noise; leave until_converged out."
        )


def plan(model: StructuredModel, data: dict[str, SiloData], theta: Theta, parts: list[Part]) -> list[Stage]:
    """Prepare and check all stages before the first begins."""
    planned = []
    for options, key, num_rounds, suffix in parts:
        bound = options.bind(model)
        privacy = bound.elbo.options.privacy
        if privacy is not None and privacy.shared_by > len(data):
            raise OptionError(f"privacy: shared_by is {privacy.shared_by}, but there are {len(data)} silos.")
        apart = isinstance(privacy, UnitPrivacy)
        batches = batching.plan(model, data, theta, merge=bound.additive, apart=apart)
        check_batched_inputs(options, data, batches)
        check_participation(bound.elbo.options.participation, loop.keys(key)[0], list(data), num_rounds)
        compiled = loop.build(bound, batches, {name: silo.num_units for name, silo in data.items()})
        planned.append(Stage(bound, batches, compiled, key, num_rounds, suffix, {}, None))
    return planned


def checkpoints(
    path: str | os.PathLike, print_: dict[str, str], every: float, planned: list[Stage]
) -> list[Checkpoint | None]:
    """The file of each stage, each checked; those of other stages than the main one lie beside it."""
    files = [Checkpoint(f"{os.fspath(path)}{stage.suffix}", print_, every=every) for stage in planned]
    for file, stage in zip(files, planned, strict=True):
        file.check(stage.num_rounds)
    return list(files)


def warm(start: Fit | None, stage: Stage, theta: Theta, data: dict[str, SiloData]) -> Parameters | None:
    """The parameters of an earlier fit; silos that it does not know, or whose units changed, begin anew."""
    if start is None:
        return None
    if not isinstance(start, Fit):
        raise OptionError(f"start is {start!r}; give what sfvi.fit or sfvi.load returned.")
    shared, elbo = start.posterior.shared, stage.bound.elbo
    fresh = elbo.start_shared(stage.key, theta)
    if shared.family.center.shape != fresh.family.center.shape or _shapes(shared[1:]) != _shapes(fresh[1:]):
        raise OptionError(
            "start is a fit of another model: its global latents, theta or network differ from this one's."
        )
    if _shapes(shared.family) != _shapes(fresh.family):
        raise OptionError(
            f"start has a {type(shared.family).__name__} in {shared.family.center.dtype}, this fit a "
            f"{type(fresh.family).__name__} in {fresh.family.center.dtype}; give both the same global_family and "
            "precision."
        )
    families, silo_key = {}, loop.keys(stage.key)[1]
    for name, silo in data.items():
        families[name] = elbo.start_silo(silo_key, shared, silo)
        if name in start.silo_names and _shapes(start.silo(name).free) == _shapes(families[name]):
            families[name] = start.silo(name).free
    return Parameters(shared, families)


def _shapes(tree):
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
