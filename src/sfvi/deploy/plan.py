"""What both sides make of a run by themselves: the algorithms, their keys, and what messages look like."""

import dataclasses
import functools
import json
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import stages
from .._compile import on_one_thread
from .._random import as_key
from .._types import Key, Theta
from ..algorithms import AlgorithmOptions, FederatedAlgorithm
from ..bounds import Bound
from ..convergence import StoppingRule
from ..engines import loop
from .code import Code
from .spec import RunSpec, choose


class Compiled:
    """Both sides' functions of one algorithm, compiled once for all who are in one process and have the same shapes.

    Args:
        algorithm: The algorithm.
    """

    def __init__(self, algorithm: FederatedAlgorithm):
        @on_one_thread
        def start(key, handed, broadcast, data):
            if handed is None:
                return algorithm.silo_init(key, broadcast, data)
            return algorithm.silo_start(handed, broadcast, data)

        @eqx.filter_jit
        def step(key, state, broadcast, data):
            return algorithm.silo_step(key, state, broadcast, data)

        @on_one_thread
        def finish(key, state, broadcast, data):
            return algorithm.silo_finish(key, state, broadcast, data)

        @on_one_thread
        def begin(key, state):
            return algorithm.participants(key, state), algorithm.broadcast(key, state)

        @on_one_thread
        def apply(state, broadcast, replies, participants):
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies)
            return algorithm.server_step(state, broadcast, stacked, participants)

        @on_one_thread
        def silent(broadcast):
            return algorithm.silent(broadcast)

        self.start, self.step, self.finish = start, step, finish
        self.step_on_one_thread = on_one_thread(step)
        self.begin, self.apply, self.silent = begin, apply, silent


class Leg(NamedTuple):
    """One algorithm's part of a run.

    Attributes:
        algorithm: Its functions.
        compiled: The same, compiled.
        server_key: Of the server's randomness.
        silo_key: Of the silos'.
        num_rounds: Rounds.
        kind: Where it stands: "start", "main" or "replicate".
    """

    algorithm: FederatedAlgorithm
    compiled: Compiled
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


def legs(spec: RunSpec, code: Code, bound: Bound) -> tuple[Leg, ...]:
    """The algorithms to run one after the other; the same objects wherever the same run is made in one process."""
    options, precision = json.dumps(spec.options, sort_keys=True), str(jnp.result_type(float))
    return _legs(spec.algorithm, options, spec.key, spec.num_rounds, spec.until_converged, code, bound, precision)


@functools.lru_cache(maxsize=8)
def _legs(algorithm, plain, key, rounds, until_converged, code, bound, precision):
    del precision  # arrays inside algorithms have it
    options: Any = dataclasses.replace(choose(algorithm, json.loads(plain), code.neighbour), bound=bound)  # type: ignore[type-var]
    rounds = options.usual_rounds if rounds is None else rounds
    kinds = {"": "main", ".s": "start", ".r": "replicate"}
    found = []
    for part in stages.schedule(options, as_key(key), rounds, ends=not until_converged):
        bound_to = part.options.bind(code.model)
        found.append(Leg(bound_to, Compiled(bound_to), *loop.keys(part.key), part.num_rounds, kinds[part.suffix[:2]]))
    return tuple(found)


def num_rounds(spec: RunSpec, options: AlgorithmOptions) -> int:
    """Rounds of the main algorithm."""
    return options.usual_rounds if spec.num_rounds is None else spec.num_rounds


def stopping_rule(spec: RunSpec, leg: Leg) -> StoppingRule | None:
    """The rule that may stop a leg earlier."""
    if not spec.until_converged or leg.kind != "main":
        return None
    return StoppingRule.for_rounds_of(leg.algorithm.steps_per_round)
