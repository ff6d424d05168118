"""Sums whose summands nobody sees."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sfvi.errors import RefusalError, WireError
from sfvi.privacy.masking import Masking, _stream, from_fixed, to_fixed, unmask


def silos(number):
    return {name: Masking(name, os.urandom(32), "run") for name in [f"s{i:02d}" for i in range(number)]}


def exchange(sides, values, *, answered=None, helping=None, moment="1", threshold=2):
    """A round: who answered, and who of them was there to the end."""
    keys = {name: side.public for name, side in sides.items()}
    sent = {name: side.mask(values[name], moment, keys, threshold) for name, side in sides.items()}
    there = sorted(sides) if answered is None else answered
    revealed = {
        name: sides[name].reveal(there, {other: sent[other].shares[name] for other in there}, moment, keys)
        for name in (there if helping is None else helping)
    }
    return unmask({name: sent[name].vector for name in there}, revealed, list(sides), threshold), sent, revealed


@settings(max_examples=30)
@given(
    values=arrays(float, (5, 4), elements=st.floats(-1e6, 1e6)),
    gone=st.sets(st.integers(0, 4), max_size=2),
)
def test_the_sum_of_those_who_answered_comes_out(values, gone):
    sides = silos(5)
    numbers = dict(zip(sides, values, strict=True))
    there = [name for i, name in enumerate(sides) if i not in gone]
    total, _, _ = exchange(sides, numbers, answered=there, threshold=3)
    np.testing.assert_allclose(total, sum(numbers[name] for name in there), atol=len(there) * 2.0**-33, rtol=1e-15)


def test_some_may_leave_between_the_two_messages():
    sides = silos(4)
    values = {name: np.arange(3.0) for name in sides}
    total, _, _ = exchange(sides, values, helping=list(sides)[:2])
    np.testing.assert_allclose(total, 4 * np.arange(3.0))
    with pytest.raises(WireError, match="only 1 silos gave their share, 2 are needed"):
        exchange(sides, values, helping=list(sides)[:1])
    there = list(sides)[:3]
    with pytest.raises(WireError, match="left before it could help"):
        exchange(sides, values, answered=there, helping=there[:2])


def test_what_is_sent_tells_nothing_of_the_numbers():
    """Masked vectors are uniform: equal numbers look as different as others, and bits are as often one as zero."""
    sides = silos(3)
    zeros = {name: np.zeros(4096) for name in sides}
    _, sent, _ = exchange(sides, zeros)
    words = np.stack([each.vector for each in sent.values()]).view(np.uint64)
    bits = np.unpackbits(words.view(np.uint8))
    assert abs(bits.mean() - 0.5) < 4.5 * 0.5 / np.sqrt(bits.size)
    assert len(np.unique(words)) == words.size
    _, again, _ = exchange(sides, zeros, moment="2")
    assert not np.any(again["s00"].vector == sent["s00"].vector)


def test_a_server_that_says_that_a_silo_is_gone_does_not_see_its_numbers():
    """It has the masked numbers all the same; the others give the pairs' secrets, but then not the silo's own."""
    sides = silos(3)
    values = {name: np.full(50, 7.0) for name in sides}
    keys = {name: side.public for name, side in sides.items()}
    sent = {name: side.mask(values[name], "1", keys, 2) for name, side in sides.items()}
    lied = ["s01", "s02"]
    given_ = {n: sides[n].reveal(lied, {o: sent[o].shares[n] for o in lied}, "1", keys) for n in lied}
    assert all("s00" not in each.shares for each in given_.values())
    seen = sent["s00"].vector.view(np.uint64)
    for each in given_.values():
        seen = seen - _stream(bytes.fromhex(each.pairs["s00"]), 50)  # both come after it
    assert np.all(np.abs(from_fixed(seen.view(np.int64)) - 7.0) > 1e-6)
    _, _, honest = exchange(sides, values)
    assert all("s00" in each.shares and not each.pairs for each in honest.values())


def test_shares_are_for_one_silo_and_one_round():
    sides = silos(3)
    keys = {name: side.public for name, side in sides.items()}
    sent = sides["s00"].mask(np.ones(2), "1", keys, 2)
    for name, moment, text in (
        ("s02", "1", sent.shares["s01"]),
        ("s01", "2", sent.shares["s01"]),
        ("s01", "1", "00" + sent.shares["s01"][2:]),
        ("s01", "1", "no hex"),
    ):
        with pytest.raises(WireError, match="cannot be read"):
            sides[name].reveal(["s00"], {"s00": text}, moment, keys)


@given(values=arrays(float, 6, elements=st.floats(-1e8, 1e8)))
def test_fixed_point_is_as_exact_as_it_says(values):
    assert np.max(np.abs(from_fixed(to_fixed(values, 3)) - values)) <= 2.0**-33


@pytest.mark.parametrize("value", [1e9, -1e9, np.nan, np.inf])
def test_numbers_that_could_overflow_are_refused(value):
    with pytest.raises(RefusalError, match="too large for a secure sum"):
        to_fixed(np.array([value]), 3)
