"""Rounds of a federated algorithm, fused into one compiled loop."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._compile import calls_lapack, on_one_thread
from .._types import Key, Scalar
from ..algorithms import FederatedAlgorithm
from ..algorithms.base import StepsTogether
from ..algorithms.participation import Participants
from ..families import StructuredLocal
from .batching import Batch

MAX_CHUNK = 1000  # rounds per call of the compiled loop at most; a call may do fewer


class State(NamedTuple):
    """The state of the server and of every batch of silos."""

    server: Any
    silos: tuple[Any, ...]


class Chunk(NamedTuple):
    """Outcome of one call: the state, how many rounds were done, and for each the ELBO and the server's Info."""

    state: State
    rounds: Int[Array, ""]
    trace: dict[str, Float[Array, " chunk"]]


class Done(NamedTuple):
    """What silos did in a round: their states, replies and ELBO terms, the latter in the order of their names."""

    silos: tuple[Any, ...]
    replies: Any
    elbo_terms: Float[Array, " replies"]
    participants: Participants


class Loop(eqx.Module):
    """The functions of an algorithm on given silos.

    Merged silos have one reply, and so have stacked ones whose steps the algorithm takes together. A call runs any
    number of rounds up to `MAX_CHUNK` with the same compiled code, so how a run is cut into calls changes nothing: same
    key, same digits.
    """

    datas: tuple
    num_units: Float[Array, " silos"]
    algorithm: FederatedAlgorithm = eqx.field(static=True)
    stacked: tuple[bool, ...] = eqx.field(static=True)
    ranks: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    def init(self, key: Key, theta: Any) -> State:
        """Make the state before the first round."""
        server_key, silo_key = keys(key)
        server = self.algorithm.server_init(server_key, theta, self.num_units)
        broadcast = self.algorithm.broadcast(server_key, server)

        def start(data):
            return self.algorithm.silo_init(silo_key, broadcast, data)

        return State(server, self._map(start, self.datas))

    def adopt(self, key: Key, shared: Any, families: tuple[StructuredLocal, ...]) -> State:
        """Make the state before the first round from parameters that another algorithm found."""
        server_key, _ = keys(key)
        server = self.algorithm.server_start(shared, self.num_units)
        broadcast = self.algorithm.broadcast(server_key, server)

        def start(family, data):
            return self.algorithm.silo_start(family, broadcast, data)

        return State(server, self._map(start, families, self.datas))

    @on_one_thread
    def finish(self, key: Key, state: State) -> tuple[StructuredLocal, ...]:
        """The local family of every batch under the last broadcast."""
        server_key, silo_key = keys(key)
        broadcast = self.algorithm.broadcast(server_key, state.server)

        def end(state, data):
            return self.algorithm.silo_finish(silo_key, state, broadcast, data)

        return self._map(end, state.silos, self.datas)

    @eqx.filter_jit  # traced once, though asked for its shapes before it is compiled
    def round(self, server_key: Key, silo_key: Key, state: State) -> tuple[State, dict[str, Scalar]]:
        """Do one round: broadcast, every silo's step, the server's step. Returns the ELBO and the server's Info."""
        broadcast, done = self.exchange(server_key, silo_key, state)
        server, info = self.algorithm.server_step(state.server, broadcast, done.replies, done.participants)
        elbo = info.elbo_term + jnp.sum(done.participants.weight * done.elbo_terms)
        others = {name: value for name, value in info._asdict().items() if name != "elbo_term"}
        return State(server, done.silos), {"elbo": elbo, **others}

    @eqx.filter_jit  # traced once, too, though asked for the sizes of messages
    def exchange(self, server_key: Key, silo_key: Key, state: State) -> tuple[Any, Done]:
        """The silos' part of a round: what they receive, and what they then do and send."""
        broadcast = self.algorithm.broadcast(server_key, state.server)

        def step(state, data):
            return self.algorithm.silo_step(silo_key, state, broadcast, data)

        if self.algorithm.elbo.options.participation.partial:
            drawn = self.algorithm.participants(server_key, state.server)
            return broadcast, self._some(step, state.silos, drawn)

        def together(states, datas):
            assert isinstance(self.algorithm, StepsTogether)
            return self.algorithm.silo_steps(silo_key, states, broadcast, datas)

        return broadcast, self._all(step, together, state.silos)

    @eqx.filter_jit
    def run(self, key: Key, state: State, num_rounds: Int[Array, ""]) -> Chunk:
        """Do up to `num_rounds` rounds; stop after one whose ELBO is not finite."""
        return self._rounds(key, state, num_rounds)

    @on_one_thread
    def run_on_one_thread(self, key: Key, state: State, num_rounds: Int[Array, ""]) -> Chunk:
        """The same for rounds that call LAPACK, see `_compile.py`."""
        return self._rounds(key, state, num_rounds)

    def calls_lapack(self, key: Key, state: State) -> bool:
        """Whether a round does."""
        return calls_lapack(lambda state: self.round(*keys(key), state)[1], state)

    def _rounds(self, key, state, num_rounds):
        server_key, silo_key = keys(key)

        def going(chunk):
            last = chunk.trace["elbo"][jnp.maximum(chunk.rounds - 1, 0)]
            return (chunk.rounds < num_rounds) & jnp.isfinite(last)

        def advance(chunk):
            state, values = self.round(server_key, silo_key, chunk.state)
            trace = {name: chunk.trace[name].at[chunk.rounds].set(value) for name, value in values.items()}
            return Chunk(state, chunk.rounds + 1, trace)

        kinds = jax.eval_shape(self.round, server_key, silo_key, state)[1]
        trace = {name: jnp.zeros(MAX_CHUNK, kind.dtype) for name, kind in kinds.items()}
        return jax.lax.while_loop(going, advance, Chunk(state, jnp.zeros((), jnp.int32), trace))

    def trace_names(self, key: Key, state: State) -> list[str]:
        """What the trace of a round holds."""
        return list(jax.eval_shape(self.round, *keys(key), state)[1])

    def message_sizes(self, keys: tuple[Key, Key], state: State) -> tuple[int, int]:
        """Bytes that one silo receives and sends in a round."""
        broadcast, done = jax.eval_shape(self.exchange, *keys, state)
        there = sum(_nbytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(broadcast))
        back = sum(_nbytes(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(done.replies))
        return there, back

    def _map(self, function, *trees):
        batches = zip(*trees, self.stacked, strict=True)
        return tuple(jax.vmap(function)(*args) if stacked else function(*args) for *args, stacked in batches)

    def _all(self, step, together, silos):
        """Everyone's step, the replies in the order of the silos' names."""
        done = []
        for *both, stacked in zip(silos, self.datas, self.stacked, strict=True):
            if stacked and not takes_together(self.algorithm):
                done.append(jax.vmap(step)(*both))
                continue
            state, *told = together(*both) if stacked else step(*both)
            done.append((state, *jax.tree.map(lambda leaf: leaf[None], told)))
        states, replies, infos = zip(*done, strict=True)
        ranks = np.concatenate([np.asarray(rank) for rank in self.ranks])
        replies, elbo_terms = _sorted((replies, tuple(info.elbo_term for info in infos)), ranks)
        everyone = Participants(jnp.arange(len(ranks)), jnp.ones(len(ranks), elbo_terms.dtype))
        return Done(tuple(states), replies, elbo_terms, everyone)

    def _some(self, step, silos, drawn):
        """The steps of those who take part; as many silos of a batch are computed as could at most."""
        num_silos, most = self.num_units.shape[0], drawn.index.shape[0]
        weights = jnp.zeros(num_silos, drawn.weight.dtype).at[drawn.index].set(drawn.weight)
        states, replies, elbo_terms, listed = [], [], [], []
        for silo, data, ranks in zip(silos, self.datas, self.ranks, strict=True):
            rank = jnp.asarray(ranks)
            present = weights[rank] > 0
            rows = jnp.argsort(~present, stable=True)[: min(most, len(ranks))]
            old = jax.tree.map(lambda leaf, rows=rows: leaf[rows], silo)
            new, reply, info = jax.vmap(step)(old, jax.tree.map(lambda leaf, rows=rows: leaf[rows], data))
            kept = jax.tree.map(lambda n, o, p=present[rows]: jnp.where(_like(p, n), n, o), new, old)
            states.append(jax.tree.map(lambda leaf, row, rows=rows: leaf.at[rows].set(row), silo, kept))
            replies.append(reply)
            elbo_terms.append(jnp.where(present[rows], info.elbo_term, 0.0))
            listed.append(rank[rows])
        ranks = jnp.concatenate(listed)
        replies, elbo_terms = _sorted((tuple(replies), tuple(elbo_terms)), ranks)
        ranks = jnp.sort(ranks)
        weight = weights[ranks]
        replies = jax.tree.map(lambda leaf: jnp.where(_like(weight > 0, leaf), leaf, 0), replies)
        return Done(tuple(states), replies, elbo_terms, Participants(ranks, weight))


def _sorted(parts, ranks):
    """Join the batches' rows and put them in the order of the silos' names."""
    parts = tuple(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *part) for part in parts)
    if isinstance(ranks, np.ndarray):
        if np.all(np.diff(ranks) > 0):
            return parts
        order = np.argsort(ranks)
    else:
        order = jnp.argsort(ranks)
    return jax.tree.map(lambda leaf: leaf[order], parts)


def _nbytes(shape, dtype):
    """Of an array; a key is two words."""
    return math.prod(shape) * (8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize)


def _like(mask, leaf):
    return mask.reshape(mask.shape + (1,) * (leaf.ndim - 1))


def build(algorithm: FederatedAlgorithm, batches: Sequence[Batch], num_units: Mapping[str, Array]) -> Loop:
    """Make the loop for batches of silos, whose numbers of units are given by name."""
    rank = {name: position for position, name in enumerate(sorted(num_units))}
    apart = not takes_together(algorithm)
    rows = [batch.names if batch.stacked and apart else batch.names[:1] for batch in batches]
    return Loop(
        datas=tuple(batch.data for batch in batches),
        num_units=jnp.stack([num_units[name] for name in sorted(num_units)]),
        algorithm=algorithm,
        stacked=tuple(batch.stacked for batch in batches),
        ranks=tuple(tuple(rank[name] for name in names) for names in rows),
    )


def takes_together(algorithm: FederatedAlgorithm) -> bool:
    """Whether silos side by side have one reply, the sum of theirs."""
    return algorithm.additive and isinstance(algorithm, StepsTogether)


def keys(key: Key) -> tuple[Key, Key]:
    """The keys of the server and of the silos."""
    return jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
