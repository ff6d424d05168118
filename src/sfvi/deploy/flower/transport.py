"""Messages through a Flower grid: to a silo's node, which is known by its key."""

import logging
import time
from collections import deque
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message, RecordDict

from ...errors import DeploymentError
from ..exchange import Lost
from . import keys

log = logging.getLogger("sfvi")
MESSAGE_TYPE = "query"
RECORD, FIELD = "sfvi", "bytes"
SECONDS_TO_LIVE = 86400.0  # of a message; a step that takes longer is lost
LOOK_EVERY = 0.25
CLIENT_FAILS = {1: "its ClientApp cannot be loaded; is sfvi installed there?", 7: "it does not take this Flower app"}
RAISED = 2


class Grid(Protocol):
    """What is needed of Flower's Grid."""

    def get_nodes(self) -> Any: ...
    def push_messages(self, messages: Any) -> Any: ...
    def pull_messages(self, message_ids: Any) -> Any: ...


class GridTransport:
    """Carries messages through Flower.

    Which node is which silo follows from the key that Flower has checked, not from anything that a node says.

    Args:
        grid: Flower's.
        table: For each silo its key, see `kits.table`.
    """

    def __init__(self, grid: Grid, table: dict[str, bytes]):
        self._grid, self._names = grid, {key: name for name, key in table.items()}
        self._unsent: dict[str, bytes] = {}
        self._sent: dict[str, tuple[str, int]] = {}
        self._answers: deque[tuple[str, bytes | Lost]] = deque()
        self._strangers: set[int] = set()

    @property
    def forgetful(self) -> bool:
        """True: at a node every message is a new process."""
        return True

    def send(self, name: str, request: bytes) -> None:
        """Hand over a message; it leaves with the next look for answers."""
        self._unsent[name] = request

    def receive(self, timeout: float) -> tuple[str, bytes | Lost] | None:
        """The next answer."""
        until = time.monotonic() + timeout
        while True:
            if self._unsent:
                self._push()
            if not self._answers and self._sent:
                self._pull()
            if self._answers:
                return self._answers.popleft()
            left = until - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(LOOK_EVERY, left))

    def online(self) -> dict[str, int]:
        """The silos whose nodes are there."""
        found: dict[str, int] = {}
        for node in self._grid.get_nodes():
            name = self._names.get(_key_of(node))
            if name is None:
                if node.node_id not in self._strangers:
                    log.warning("node %d has a key of no silo; it is not listened to", node.node_id)
                self._strangers.add(node.node_id)
            elif name in found:
                raise DeploymentError(f"Two nodes have the key of silo {name!r}; stop one, and find out who it is.")
            else:
                found[name] = node.node_id
        return found

    def _push(self):
        nodes, requests = self.online(), self._unsent
        self._unsent = {}
        for name, request in requests.items():
            if name not in nodes:
                self._answers.append((name, Lost("it is not connected", gone=False)))
                continue
            content = RecordDict({RECORD: ConfigRecord({FIELD: request})})
            message = Message(content, nodes[name], MESSAGE_TYPE, ttl=SECONDS_TO_LIVE)
            number = next(iter(self._grid.push_messages([message])), None)
            if number is None:
                self._answers.append((name, Lost("the SuperLink does not take its message", gone=False)))
            else:
                self._sent[number] = (name, nodes[name])

    def _pull(self):
        for message in self._grid.pull_messages(list(self._sent)):
            name, node = self._sent.pop(message.metadata.reply_to_message_id, (None, None))
            if name is None:
                continue
            self._answers.append((name, _lost(message, name) if message.has_error() else _bytes(message, name, node)))


def _key_of(node):
    try:
        return keys.identity(node.public_key)
    except Exception:  # a node without a key, or with one of a kind that is not used here
        return b""


def _bytes(message, name, node):
    if message.metadata.src_node_id != node:
        raise DeploymentError(f"Another node answers for silo {name!r}; find out who it is.")
    record = message.content.get(RECORD)
    answer = record.get(FIELD) if isinstance(record, ConfigRecord) else None
    if not isinstance(answer, bytes):
        raise DeploymentError(f"Silo {name!r} answers something else than it was asked.")
    return answer


def _lost(message, name):
    """What an error means: mostly that the message is lost, as when a node or its process dies."""
    error = message.error
    if error.code in CLIENT_FAILS:
        raise DeploymentError(f"Silo {name!r} cannot take part: {CLIENT_FAILS[error.code]}.")
    if error.code == RAISED:
        raise DeploymentError(f"Silo {name!r} failed; its SuperNode's log says why.")
    return Lost(f"Flower's error {error.code}", gone=False)
