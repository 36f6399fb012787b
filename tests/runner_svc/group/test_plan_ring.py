"""Every reader gets every record once and in order, whatever its size and however slow the reader; a waiter wakes."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time

import pytest

from runner_svc.group.plan_ring import PlanRing, framed
from runner_svc.group.records import Kind, Record
from runner_svc.group.shared_page import RING_BYTES, attach, create
from runner_svc.interface.ranks import RankLost
from tests.support.thoroughness import count


@pytest.fixture
def memory() -> mmap.mmap:
    page = create()
    shared = attach(page)
    os.close(page)
    return shared


def rings(memory: mmap.mmap, size: int, lost: list[str], poll_s: float = 0.0) -> list[PlanRing]:
    return [PlanRing(memory, rank, size, lambda: lost[0] if lost else "", poll_s) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("poll_s", [0.0, 0.001])
@pytest.mark.parametrize("largest", [100, 5000, RING_BYTES * 2])
def test_readers_get_all_records_in_order(memory: mmap.mmap, size: int, poll_s: float, largest: int) -> None:
    rng = random.Random(largest)
    number = count(3000, in_ci=300) if largest < RING_BYTES else 6
    records = [rng.randbytes(rng.randrange(largest)) for _ in range(number)]
    writer, *readers = rings(memory, size, [], poll_s)
    got: list[list[bytes]] = [[] for _ in readers]

    def read(reader: PlanRing, into: list[bytes], slow: random.Random) -> None:
        for _ in records:
            if slow.random() < 0.02:
                time.sleep(0.002)
            into.append(reader.read())

    threads = [
        threading.Thread(target=read, args=(reader, into, random.Random(place)))
        for place, (reader, into) in enumerate(zip(readers, got, strict=True))
    ]
    for thread in threads:
        thread.start()
    for record in records[:-1]:
        writer.write(record, wake=rng.random() < 0.7)
    writer.write(records[-1])
    for thread in threads:
        thread.join()
    assert got == [records] * len(readers)


def test_the_writer_waits_for_the_slowest_reader(memory: mmap.mmap) -> None:
    writer, quick, slow = rings(memory, 3, [])
    half = bytes(RING_BYTES // 2)
    writer.write(half)
    assert quick.read() == half
    written = threading.Event()

    def write() -> None:
        writer.write(b"x" * (RING_BYTES // 2))
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not written.wait(0.2)
    assert slow.read() == half
    assert written.wait(5)
    thread.join()
    assert slow.read() == quick.read() == b"x" * (RING_BYTES // 2)


def test_whoever_waits_hears_that_the_group_is_given_up(memory: mmap.mmap) -> None:
    lost: list[str] = []
    writer, reader = rings(memory, 2, lost)
    threading.Timer(0.1, lost.append, ["rank 3 is gone"]).start()
    with pytest.raises(RankLost, match="rank 3 is gone"):
        reader.read()
    with pytest.raises(RankLost, match="rank 3 is gone"):
        writer.write(bytes(RING_BYTES + 1))


def test_a_restarted_ring_has_nothing_of_before(memory: mmap.mmap) -> None:
    writer, reader = rings(memory, 2, [])
    writer.write(b"old")
    writer.restart()
    for ring in (writer, reader):
        ring.begin()
    writer.write(b"new")
    assert reader.read() == b"new"


def test_the_reader_does_other_things_meanwhile(memory: mmap.mmap) -> None:
    writer, reader = rings(memory, 2, [])
    calls: list[int] = []

    def meanwhile() -> bool:
        calls.append(0)
        if len(calls) == 20:
            writer.write(b"late")
        return True

    reader.meanwhile = meanwhile
    begin = time.monotonic()
    assert reader.read() == b"late"
    assert len(calls) == 20 and time.monotonic() - begin < 1


def test_a_writer_that_does_not_wait_writes_what_there_is_room_for(memory: mmap.mmap) -> None:
    writer, reader = rings(memory, 2, [])
    record = random.Random(1).randbytes(2 * RING_BYTES)
    rest = framed(record)
    had: list[bytes] = []
    thread = threading.Thread(target=lambda: had.append(reader.read()), daemon=True)
    assert writer.write_some(rest) == RING_BYTES and writer.write_some(rest[RING_BYTES:]) == 0
    rest = rest[RING_BYTES:]
    thread.start()
    while rest:
        rest = rest[writer.write_some(rest) :]
        time.sleep(0.001)
    thread.join(20)
    assert had == [record]


@pytest.mark.parametrize("kind", list(Kind))
def test_records_survive_packing(kind: Kind) -> None:
    for record in (Record(kind), Record(kind, 2**63, b"body"), Record(kind, 1, bytes(1000))):
        assert Record.read(record.packed()) == record
