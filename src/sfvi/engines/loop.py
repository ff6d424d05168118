"""Rounds of a federated algorithm, fused into one compiled loop."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._types import Key, Scalar
from ..algorithms import FederatedAlgorithm
from .batching import Batch

MAX_CHUNK = 1000  # rounds per call of the compiled loop at most; a call may do fewer


class State(NamedTuple):
    """The state of the server and of every batch of silos."""

    server: Any
    silos: tuple[Any, ...]


class Chunk(NamedTuple):
    """Outcome of one call: the state, how many rounds were done, and the ELBO estimate of each."""

    state: State
    rounds: Int[Array, ""]
    elbo: Float[Array, " chunk"]


class Loop(eqx.Module):
    """The five functions on given silos.

    A call runs any number of rounds up to `MAX_CHUNK` with the same compiled code, so how a run is cut into calls
    changes nothing: same key, same digits.
    """

    datas: tuple
    algorithm: FederatedAlgorithm = eqx.field(static=True)
    stacked: tuple[bool, ...] = eqx.field(static=True)
    order: tuple[int, ...] = eqx.field(static=True)

    def init(self, key: Key, theta: Any) -> State:
        """Make the state before the first round."""
        server_key, silo_key = keys(key)
        server = self.algorithm.server_init(server_key, theta)
        silos = []
        for data, stacked in zip(self.datas, self.stacked, strict=True):
            start = partial(self.algorithm.silo_init, silo_key)
            silos.append(jax.vmap(start)(data) if stacked else start(data))
        return State(server, tuple(silos))

    def round(self, server_key: Key, silo_key: Key, state: State) -> tuple[State, Scalar]:
        """Do one round: broadcast, every silo's step, the server's step. Returns the ELBO estimate too."""
        broadcast = self.algorithm.broadcast(server_key, state.server)

        def step(state, data):
            return self.algorithm.silo_step(silo_key, state, broadcast, data)

        done = [
            jax.vmap(step)(*both) if stacked else jax.tree.map(lambda x: x[None], step(*both))
            for *both, stacked in zip(state.silos, self.datas, self.stacked, strict=True)
        ]
        silos, replies, infos = zip(*done, strict=True)
        silos = [
            silo if stacked else jax.tree.map(lambda x: x[0], silo)
            for silo, stacked in zip(silos, self.stacked, strict=True)
        ]
        replies = self._in_order(replies)
        server, info = self.algorithm.server_step(state.server, broadcast, replies)
        elbo = info.elbo_term + sum(i.elbo_term.sum() for i in infos)
        return State(server, tuple(silos)), elbo

    @eqx.filter_jit
    def run(self, key: Key, state: State, num_rounds: Int[Array, ""]) -> Chunk:
        """Do up to `num_rounds` rounds; stop after one whose ELBO is not finite."""
        server_key, silo_key = keys(key)

        def going(chunk):
            last = chunk.elbo[jnp.maximum(chunk.rounds - 1, 0)]
            return (chunk.rounds < num_rounds) & jnp.isfinite(last)

        def advance(chunk):
            state, elbo = self.round(server_key, silo_key, chunk.state)
            return Chunk(state, chunk.rounds + 1, chunk.elbo.at[chunk.rounds].set(elbo))

        trace = jnp.zeros(MAX_CHUNK, jnp.result_type(float))
        return jax.lax.while_loop(going, advance, Chunk(state, jnp.zeros((), jnp.int32), trace))

    def _in_order(self, replies):
        """Stack the replies in the order of the silos' names."""
        if len(replies) == 1:
            return replies[0]
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *replies)
        if list(self.order) == sorted(self.order):
            return joined
        order = np.argsort(self.order)
        return jax.tree.map(lambda leaf: leaf[order], joined)


def build(algorithm: FederatedAlgorithm, batches: Sequence[Batch]) -> Loop:
    """Make the loop for batches of silos."""
    names = [name for batch in batches for name in batch.names]
    rank = {name: position for position, name in enumerate(sorted(names))}
    merged_first = [batch.names if batch.stacked else batch.names[:1] for batch in batches]
    order = [rank[name] for names in merged_first for name in names]
    return Loop(
        datas=tuple(batch.data for batch in batches),
        algorithm=algorithm,
        stacked=tuple(batch.stacked for batch in batches),
        order=tuple(order),
    )


def keys(key: Key) -> tuple[Key, Key]:
    """The keys of the server and of the silos."""
    return jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
