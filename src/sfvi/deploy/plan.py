"""What both sides make of a run by themselves: the algorithms, their keys, and what messages look like."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp

from .. import stages
from .._random import as_key
from .._types import Key, Theta
from ..algorithms import AlgorithmOptions, FederatedAlgorithm
from ..bounds import Bound
from ..convergence import StoppingRule
from ..engines import loop
from .code import Code
from .spec import RunSpec


class Leg(NamedTuple):
    """One algorithm's part of a run.

    Attributes:
        algorithm: Its functions.
        server_key: Of the server's randomness.
        silo_key: Of the silos'.
        num_rounds: Rounds.
        kind: Where it stands: "start", "main" or "replicate".
    """

    algorithm: FederatedAlgorithm
    server_key: Key
    silo_key: Key
    num_rounds: int
    kind: str

    def broadcast_like(self, theta: Theta, num_silos: int) -> Any:
        """What a broadcast looks like."""
        num_units = jnp.ones(num_silos, jnp.result_type(float))

        def first(theta):
            server = self.algorithm.server_init(self.server_key, theta, num_units)
            return self.algorithm.broadcast(self.server_key, server)

        return eqx.filter_eval_shape(first, theta)

    def silent_like(self, broadcast_like: Any) -> Any:
        """What a reply looks like."""
        return eqx.filter_eval_shape(self.algorithm.silent, broadcast_like)


def legs(spec: RunSpec, code: Code, bound: Bound) -> list[Leg]:
    """The algorithms to run one after the other."""
    options: Any = dataclasses.replace(spec.chosen(code), bound=bound)  # type: ignore[type-var]
    parts = stages.schedule(options, as_key(spec.key), num_rounds(spec, options), ends=not spec.until_converged)
    kinds = {"": "main", ".s": "start", ".r": "replicate"}
    return [
        Leg(part.options.bind(code.model), *loop.keys(part.key), part.num_rounds, kinds[part.suffix[:2]])
        for part in parts
    ]


def num_rounds(spec: RunSpec, options: AlgorithmOptions) -> int:
    """Rounds of the main algorithm."""
    return options.usual_rounds if spec.num_rounds is None else spec.num_rounds


def stopping_rule(spec: RunSpec, leg: Leg) -> StoppingRule | None:
    """The rule that may stop a leg earlier."""
    if not spec.until_converged or leg.kind != "main":
        return None
    return StoppingRule.for_rounds_of(leg.algorithm.steps_per_round)
