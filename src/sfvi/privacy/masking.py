r"""Masks that vanish in a sum: what the server of a run must not see, it does not see (Bonawitz et al. 2017).

Silo i sends, modulo $2^{64}$,

$$y_i = x_i + P(b_i) + \sum_{j > i} P(s_{ij}) - \sum_{j < i} P(s_{ij})$$

with $P$ the ChaCha20 stream, $s_{ij}$ a secret of i and j for this round (X25519, HKDF) and $b_i$ one of its own, of
which every silo gets a share (Shamir; encrypted, the server only carries it). When the server has said whose answers
came, the silos that answered give their shares of those $b_i$, and $s_{ij}$ with each j whose answer did not come: of
every silo one of the two, never both. What comes out is $\sum_i x_i$ over those who answered, and nothing else.

Numbers travel in fixed point, $x = 2^{-32} k$.
"""

import hmac
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from ..errors import OptionError, RefusalError, WireError

BITS = 32  # after the point
SEED = 16  # bytes of b: what the library's secret sharing takes
Vector = Int64[np.ndarray, " n"]


class Masked(NamedTuple):
    """A silo's answer in a round.

    Attributes:
        vector: Its numbers, masked.
        shares: For every other silo a share of its own secret, encrypted, as text.
    """

    vector: Vector
    shares: dict[str, str]


class Revealed(NamedTuple):
    """What a silo gives when it knows who answered, as text.

    Attributes:
        shares: Of those who answered, its share of their own secret.
        pairs: Of those who did not, the secret that it has with them in this round.
    """

    shares: dict[str, str]
    pairs: dict[str, str]


class Masking:
    """A silo's keys in one run.

    Args:
        name: The silo.
        private: 32 bytes that nobody else knows.
        run: The run, so that other runs have other masks.
    """

    def __init__(self, name: str, private: bytes, run: str):
        curve = _library().x25519.X25519PrivateKey
        self.name, self._run = name, run
        self._private = curve.from_private_bytes(private)
        self._agreed: dict[str, bytes] = {}

    @property
    def public(self) -> str:
        """What the others need to know, as text."""
        return self._private.public_key().public_bytes_raw().hex()

    def meet(self, keys: Mapping[str, str]) -> None:
        """Refuse public keys of others with which no secret can be made."""
        for name in sorted(set(keys) - {self.name}):
            self._agree(name, keys[name])

    def mask(self, values: Float[np.ndarray, " n"], moment: str, keys: Mapping[str, str], threshold: int) -> Masked:
        """Mask numbers.

        Args:
            values: The numbers; those of all silos must not be too many or too large for their sum.
            moment: The round; no two answers may have the same, unless they are the same.
            keys: Public keys of all who take part in it, this silo included.
            threshold: How many shares give a silo's own secret.
        """
        vector = to_fixed(values, len(keys)).view(np.uint64).copy()
        seed = self._pair(self.name, keys, moment)[:SEED]  # asked again, the same
        vector += _stream(seed + bytes(32 - SEED), len(vector))
        others = sorted(set(keys) - {self.name})
        for other in others:
            sign = 1 if other > self.name else -1
            vector = _plus(vector, _stream(self._pair(other, keys, moment), len(vector)), sign)
        parts = [part for _, part in _library().Shamir.split(threshold, len(keys), seed)]
        shares = {to: self._lock(part, to, keys, moment) for to, part in zip(sorted(keys), parts, strict=True)}
        return Masked(vector.view(np.int64), shares)

    def reveal(
        self, answered: Iterable[str], shares: Mapping[str, str], moment: str, keys: Mapping[str, str]
    ) -> Revealed:
        """Give what is needed for the sum of those who answered.

        Args:
            answered: Who did.
            shares: For each of them what it sent for this silo.
            moment: The round.
            keys: As there.
        """
        there = sorted(set(answered))
        mine = {name: self._unlock(shares[name], name, keys, moment).hex() for name in there}
        gone = sorted(set(keys) - set(there))
        return Revealed(mine, {name: self._pair(name, keys, moment).hex() for name in gone})

    def _pair(self, other, keys, moment, what="mask"):
        """The secret that this silo and another have in a round."""
        library = _library()
        agreed = self._agree(other, keys[other])
        pair = "|".join(sorted((self.name, other)))
        about = f"{self._run}|{moment}|{pair}|{what}".encode()
        return library.HKDF(algorithm=library.SHA256(), length=32, salt=None, info=about).derive(agreed)

    def _agree(self, other, key):
        """What the two can compute from the other's public key and their own private one, and nobody else."""
        if key not in self._agreed:
            if other == self.name:
                self._agreed[key] = hmac.digest(self._private.private_bytes_raw(), b"to itself", "sha256")
            else:
                public = _library().x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(key))
                try:
                    self._agreed[key] = self._private.exchange(public)
                except ValueError:  # one of the few with which everybody agrees on zero
                    raise RefusalError(f"the server gives a key of silo {other!r} that is none") from None
        return self._agreed[key]

    def _lock(self, share, to, keys, moment):
        cipher = _library().ChaCha20Poly1305(self._pair(to, keys, moment, "share"))
        nonce = os.urandom(12)
        return (nonce + cipher.encrypt(nonce, share, f"{self.name}|{to}".encode())).hex()

    def _unlock(self, text, sender, keys, moment):
        cipher = _library().ChaCha20Poly1305(self._pair(sender, keys, moment, "share"))
        try:
            raw = bytes.fromhex(text)
            return cipher.decrypt(raw[:12], raw[12:], f"{sender}|{self.name}".encode())
        except (ValueError, TypeError, _library().InvalidTag):
            raise WireError("what another silo sent for it cannot be read") from None


def unmask(
    vectors: Mapping[str, Vector], revealed: Mapping[str, Revealed], silos: Sequence[str], threshold: int
) -> Float[np.ndarray, " n"]:
    """The sum of the numbers of those who answered.

    Args:
        vectors: Their masked numbers.
        revealed: What they, or enough of them, gave after that.
        silos: All who took part in the round.
        threshold: How many shares give a silo's own secret.
    """
    order, gone = sorted(silos), sorted(set(silos) - set(vectors))
    total = np.zeros(len(next(iter(vectors.values()))), np.uint64)
    for name, vector in vectors.items():
        total += vector.view(np.uint64)
        shares = [(order.index(who) + 1, bytes.fromhex(given.shares[name])) for who, given in revealed.items()]
        if len(shares) < threshold:
            raise WireError(f"only {len(shares)} silos gave their share, {threshold} are needed")
        seed = _library().Shamir.combine(shares[:threshold])
        total -= _stream(seed + bytes(32 - SEED), len(total))
        for other in gone:
            if name not in revealed:
                raise WireError(f"silo {name!r} left before it could help with those who had left")
            mask = _stream(bytes.fromhex(revealed[name].pairs[other]), len(total))
            total = _plus(total, mask, -1 if other > name else 1)
    return from_fixed(total.view(np.int64))


def to_fixed(values: Float[np.ndarray, " n"], num_silos: int) -> Vector:
    """Numbers in fixed point; refused where the sum of so many silos could be too large."""
    scaled = np.asarray(values, np.float64) * 2.0**BITS
    if not np.all(np.abs(scaled) < 2.0**63 / num_silos):  # NaN too
        most = 2.0 ** (63 - BITS) / num_silos
        raise RefusalError(
            f"a number of its reply is too large for a secure sum (at most {most:.3g}); rescale the data"
        )
    return np.rint(scaled).astype(np.int64)


def from_fixed(vector: Vector) -> Float[np.ndarray, " n"]:
    """Undo `to_fixed`."""
    return vector.astype(np.float64) * 2.0**-BITS


def _plus(total, mask, sign):
    return total + mask if sign > 0 else total - mask


def _stream(key, size):
    """Numbers that nobody can tell from random ones without the key; no key is used for two streams."""
    library = _library()
    encryptor = library.Cipher(library.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * size)), "<u8").astype(np.uint64)


class _Library(NamedTuple):
    x25519: Any
    HKDF: Any
    SHA256: Any
    ChaCha20Poly1305: Any
    InvalidTag: Any
    Cipher: Any
    ChaCha20: Any
    Shamir: Any


def _library() -> _Library:
    try:
        from Crypto.Protocol.SecretSharing import Shamir
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric import x25519
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise OptionError("secure_sum needs cryptography and pycryptodome; install sfvi[secure].") from error
    return _Library(x25519, HKDF, SHA256, ChaCha20Poly1305, InvalidTag, Cipher, ChaCha20, Shamir)
