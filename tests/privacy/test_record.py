"""The chain of a silo's record: what was taken out is seen, what a crash tore off does no harm."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from sfvi.deploy.codec import decode
from sfvi.deploy.silo import Silo
from sfvi.errors import DeploymentError, RefusalError
from sfvi.privacy import Policy
from sfvi.privacy.record import START, Record, read

from ..deploy import small
from ..deploy.helpers import Direct, code, make_silos, serve, spec


def made(path, number=4):
    record = Record(path, lambda _: None)
    for each in range(number):
        record.add({"number": each})
    return record


def opened(path):
    """The numbers in a record that is whole."""
    found = []
    Record(path, lambda entry: found.append(entry["number"]))
    return found


def test_each_line_holds_the_hash_of_the_line_before(tmp_path):
    made(tmp_path / "record")
    lines = (tmp_path / "record").read_bytes().splitlines()
    before = [START, *(hashlib.sha256(line).hexdigest() for line in lines)]
    assert [json.loads(line)["before"] for line in lines] == before[:-1]
    assert read(tmp_path / "record").last == before[-1]


CHANGES = {
    "the first taken out": (lambda lines: lines[1:], 1),
    "one taken out": (lambda lines: [lines[0], *lines[2:]], 2),
    "altered": (lambda lines: [lines[0].replace(b"0,", b"9,"), *lines[1:]], 2),
    "put in": (lambda lines: [*lines[:2], lines[1], *lines[2:]], 3),
    "swapped": (lambda lines: [lines[0], lines[2], lines[1], lines[3]], 2),
    "damaged": (lambda lines: [*lines[:3], b"\xff" + lines[3]], 4),
    "no object": (lambda lines: [*lines, b"3"], 5),
    "empty": (lambda lines: [*lines, b""], 5),
    "without a chain": (lambda lines: [b'{"number": 0}'], 1),
}


@pytest.mark.parametrize(("change", "line"), CHANGES.values(), ids=CHANGES)
def test_what_was_taken_out_or_altered_is_found(tmp_path, change, line):
    path = tmp_path / "record"
    made(path)
    path.write_bytes(b"".join(each + b"\n" for each in change(path.read_bytes().splitlines())))
    assert read(path).broken == line
    assert len(read(path).entries) == line - 1
    with pytest.raises(RefusalError, match="sfvi silo audit"):
        opened(path)


def test_a_line_that_was_torn_off_anywhere_did_not_leave_and_is_mended(tmp_path):
    """As when a process is killed while it writes, or the machine loses its power, which may leave zeros."""
    path = tmp_path / "record"
    made(path)
    whole = path.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    tails = [whole[start:end] for end in range(start, len(whole))] + [bytes(100), b"\xff\xfe"]
    for tail in tails:
        path.write_bytes(whole[:start] + tail)
        assert opened(path) == [0, 1, 2]
        assert path.read_bytes() == whole[:start] + tail  # who only looks changes nothing
        Record(path, lambda _: None).add({"number": 3})
        assert path.read_bytes() == whole


WRITER = """
from sfvi.privacy.record import Record
record = Record({!r}, lambda _: None)
while True:
    record.add({{"number": 1}})
"""


def test_a_record_outlives_the_death_of_its_writer(tmp_path):
    """Killed at any moment, twice; the next one goes on where it was."""
    path = tmp_path / "record"
    for _ in range(2):
        before = path.stat().st_size if path.exists() else 0
        with subprocess.Popen([sys.executable, "-c", WRITER.format(str(path))]) as writer:
            while not path.exists() or path.stat().st_size < before + 20_000:
                assert writer.poll() is None
            writer.kill()
        found = read(path)
        assert found.broken is None
        assert found.size > before
    made(path, 1)
    assert opened(path)[-1] == 0


def test_a_full_disk_leaves_a_record_that_goes_on(tmp_path, monkeypatch):
    record = made(tmp_path / "record")
    write = os.fsync

    def full(handle):
        os.ftruncate(handle, os.fstat(handle).st_size - 9)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RefusalError, match="cannot keep its record"):
        record.add({"number": 4})
    monkeypatch.setattr(os, "fsync", write)
    record.add({"number": 4})
    assert opened(tmp_path / "record") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1])),
        lambda path: Record(path, lambda _: None).add({"number": 9}),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"number": 3', b'"number": 8')),
    ],
    ids=["gone", "empty", "cut off", "written by another", "last line altered"],
)
def test_a_record_that_changes_under_a_running_silo_is_refused(tmp_path, change):
    record = made(tmp_path / "record")
    change(tmp_path / "record")
    for _ in range(2):
        with pytest.raises(RefusalError, match="was changed"):
            record.add({"number": 4})


def test_a_touched_record_that_says_the_same_is_fine(tmp_path):
    record = made(tmp_path / "record")
    (tmp_path / "record").write_bytes((tmp_path / "record").read_bytes())
    record.add({"number": 4})
    assert opened(tmp_path / "record") == [0, 1, 2, 3, 4]


def test_a_silo_with_a_broken_record_sends_nothing(tmp_path):
    """Neither one that runs, in the midst of a run, nor one that starts; with the lines back it goes on."""
    silos = make_silos(tmp_path, policy=Policy())
    path = tmp_path / "a" / "audit.jsonl"
    kept = []

    def cut(name, request):
        if name == "a" and decode(request, limit=1 << 20).step == 3:
            kept.append(path.read_bytes())
            path.write_bytes(b"".join(kept[0].splitlines(keepends=True)[2:]))

    with pytest.raises(DeploymentError, match="Silo 'a' refuses: its record of what left was changed or is damaged"):
        serve(tmp_path, spec(num_rounds=4), Direct(silos, before=cut)).run()
    with pytest.raises(RefusalError, match="restore it from a backup, then start the silo again"):
        make_silos(tmp_path)
    path.write_bytes(kept[0])
    serve(tmp_path, spec(num_rounds=4), Direct(make_silos(tmp_path))).run()
    assert read(path).broken is None


def test_a_record_that_is_gone_is_refused_whatever_the_policy(tmp_path):
    silo = Silo("a", code(), small.load("a"), tmp_path / "a")
    assert len(silo.public_key) == 64
    (tmp_path / "a" / "audit.jsonl").unlink()
    for policy in (None, Policy(epsilon=1.0)):
        with pytest.raises(RefusalError, match="record of what left is gone"):
            Silo("a", code(), small.load("a"), tmp_path / "a", policy)
