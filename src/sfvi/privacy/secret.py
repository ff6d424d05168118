"""A silo's secret, from which its noise follows: the same question gets the same noise, and nobody else can tell it."""

import hashlib
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from .._types import Key
from ..errors import RefusalError

SIZE = 32


class Secret:
    """32 random bytes in a file that only the silo's user reads, made when there is none.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)

    def key(self, question: str) -> Key:
        """The key of the noise of the answer to a question; a function of both, by SHAKE-256."""
        return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(self.bytes(question, 8), np.uint32)))

    def bytes(self, purpose: str, size: int) -> bytes:
        """As many bytes as are needed for a purpose."""
        return hashlib.shake_256(self._read() + purpose.encode()).digest(size)

    def _read(self):
        try:
            if not self._path.exists():
                self._make()
            found = self._path.read_bytes()
        except OSError as error:
            raise RefusalError("it cannot use the file of its secret, so nothing leaves") from error
        if len(found) != SIZE:
            raise RefusalError("the file of its secret is damaged, so nothing leaves; restore it from a backup")
        return found

    def _make(self):
        """Whole or not at all: a file of its own, then its name."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.urandom(SIZE))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(new, self._path)  # fails if another process was faster
        except FileExistsError:
            pass
        finally:
            new.unlink()
