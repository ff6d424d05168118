"""What the server computes in a round."""

from typing import Any

import jax.numpy as jnp

from ..algorithms.participation import Participants
from . import plan

ONE = Participants(jnp.zeros(1, jnp.int32), jnp.ones(1))  # a sum that stands for all


class Rounds:
    """The server's functions of one algorithm.

    Args:
        leg: The algorithm, as a part of the run.
        broadcast_like: What it sends.
    """

    def __init__(self, leg: plan.Leg, broadcast_like: Any):
        self._leg, self.broadcast_like = leg, broadcast_like
        self.silent = leg.compiled.silent

    def begin(self, state):
        """Who takes part, and what they are told."""
        return self._leg.compiled.begin(self._leg.server_key, state)

    def apply(self, state, broadcast, replies, drawn, weights):
        """Take in the replies of those who came."""
        present = drawn._replace(weight=jnp.asarray(weights, drawn.weight.dtype))
        return self._leg.compiled.apply(state, broadcast, replies, present)
