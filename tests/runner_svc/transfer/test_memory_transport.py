"""Moves through shared memory, with memory files of the host in place of a GPU's: grants, ends, and a source that is
killed in mid-copy."""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from runner_svc.gpu.blocks import device_blocks
from runner_svc.gpu.blocks.device_blocks import DeviceBlocks
from runner_svc.tiers.block_copies import Region
from runner_svc.transfer.grants import Grants
from runner_svc.transfer.memory_frames import Layout, MemoryRequest, address_of, new_name, read_answer
from runner_svc.transfer.memory_reader import MemoryReader
from runner_svc.transfer.memory_server import MemoryServer
from runner_svc.transfer.transport import PullFailed, PullOrder, Unreachable
from runner_svc.transfer.wire import BadFrame
from tests.support.host_blocks import HostBlockCopies, LazyBlockCopies, LazyDevice, bytes_at
from tests.support.host_device import HostDevice
from tests.support.memory_file import MemoryFile

PARTS, PIECE = 3, 32
KEY = b"the key of a test"[:16]
BLOCKS = list(range(1, 21))
KEPT: list[MemoryFile] = []
"""Memory stays mapped as long as a region's address may be used."""


def never() -> bool:
    return False


def cache_of(num_blocks: int, seed: int) -> tuple[MemoryFile, list[Region]]:
    """Returns memory with a cache of random bytes."""
    memory = MemoryFile(PARTS * (num_blocks + 1) * PIECE + 4096)
    KEPT.append(memory)
    part = (num_blocks + 1) * PIECE
    region = Region(memory.address + 128, PARTS, part, PIECE)
    rng = np.random.default_rng(seed)
    bytes_at(region.address, PARTS * part)[:] = rng.integers(0, 256, PARTS * part, np.uint8)
    return memory, [region]


def blocks_of(region: Region, blocks: list[int]) -> np.ndarray:
    """Returns the bytes of blocks, [N, parts, piece]."""
    data = bytes_at(region.address, region.num_parts * region.part_bytes)
    return data.reshape(region.num_parts, -1, region.piece_bytes)[:, blocks].transpose(1, 0, 2).copy()


def store_over(regions: list[Region], told: list[int] | None = None) -> DeviceBlocks:
    told = [] if told is None else told
    return DeviceBlocks(HostDevice(), HostBlockCopies, regions, lambda blocks: told.extend(blocks.tolist()))


def order(name: str, sources: list[int], targets: list[int], key: bytes = KEY) -> PullOrder:
    return PullOrder(key, "", b"", name, np.array(sources, np.int32), np.array(targets, np.int32))


@contextmanager
def offered(memory: MemoryFile, regions: list[Region], granted: list[int]) -> Iterator[MemoryServer]:
    grants = Grants(1000)
    grants.add(KEY, np.array(granted, np.int32), "")
    server = MemoryServer(Layout.of(memory.size, memory.address, regions), grants, memory.descriptor)
    try:
        yield server
    finally:
        server.close()


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_blocks_of_a_cache_of_another_size_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_blocks, "STAGING_BYTES", 7 * PARTS * PIECE)
    (memory, regions), (_, ours), told = cache_of(30, 1), cache_of(50, 2), []
    kept: list[int] = told
    targets = list(range(50, 30, -1))
    others = [block for block in range(51) if block not in targets]
    before = blocks_of(ours[0], others)
    reader = MemoryReader(store_over(ours, kept), MemoryFile.imported)
    with offered(memory, regions, BLOCKS) as server:
        for _ in range(2):  # the second one finds the memory mapped
            assert reader.pull(order(server.name, BLOCKS, targets), never) == 20 * PARTS * PIECE
            assert np.array_equal(blocks_of(ours[0], targets), blocks_of(regions[0], BLOCKS))
        assert reader.num_mapped == 1
    assert np.array_equal(blocks_of(ours[0], others), before)
    assert kept == targets * 2
    until(lambda: not reader.num_mapped)  # the source has ended: its memory is unmapped


def test_what_is_not_granted_is_refused_also_once_the_memory_is_mapped() -> None:
    (memory, regions), (_, ours) = cache_of(30, 1), cache_of(30, 2)
    reader = MemoryReader(store_over(ours), MemoryFile.imported)
    before = blocks_of(ours[0], BLOCKS)
    with offered(memory, regions, [1, 2]) as server:
        for _ in range(2):
            with pytest.raises(PullFailed, match="some of the blocks are not granted"):
                reader.pull(order(server.name, [3], [3]), never)
            with pytest.raises(PullFailed, match="the key of the move is unknown"):
                reader.pull(order(server.name, [1], [1], secrets.token_bytes(16)), never)
            assert np.array_equal(blocks_of(ours[0], BLOCKS), before)
            reader.pull(order(server.name, [1], [30]), never)


def test_another_host_or_layout_is_left_to_other_transports() -> None:
    (memory, regions), (_, ours) = cache_of(30, 1), cache_of(30, 2)
    reader = MemoryReader(store_over(ours), MemoryFile.imported)
    for name in ("", "another-boot/abc", new_name()):
        with pytest.raises(Unreachable):
            reader.pull(order(name, [1], [1]), never)
    other = [Region(regions[0].address, PARTS - 1, regions[0].part_bytes, PIECE)]
    with offered(memory, other, [1]) as server, pytest.raises(PullFailed, match="another layout"):
        reader.pull(order(server.name, [1], [1]), never)
    with offered(memory, regions, BLOCKS) as server, pytest.raises(PullFailed, match="session"):
        reader.pull(order(server.name, BLOCKS, BLOCKS), lambda: True)


def test_nonsense_is_refused() -> None:
    memory, regions = cache_of(30, 1)
    with offered(memory, regions, [1]) as server:
        for frame in (b"x", bytes(25), bytes(26), MemoryRequest(KEY, True, np.array([-5], np.int32)).frame()):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(address_of(server.name))
                connection.send(frame)
                data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
                assert not descriptors
                assert not data or isinstance(read_answer(data), str)
    with pytest.raises(BadFrame):
        read_answer(b"RKM1")
    layout = Layout(10, (Region(0, 2, 100, 10),))
    with pytest.raises(BadFrame, match="outside"):
        read_answer(layout.frame())
    with pytest.raises(ValueError, match="not in the shared allocation"):
        Layout.of(10, 1000, regions)


SOURCE = """
import sys, time
import numpy as np
from tests.runner_svc.transfer.test_memory_transport import *
memory, regions = cache_of(30, 1)
with offered(memory, regions, BLOCKS) as server:
    print(server.name, flush=True)
    time.sleep(60)
"""


def test_a_source_killed_in_mid_copy_leaves_right_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_blocks, "STAGING_BYTES", PARTS * PIECE)  # a block at a time
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    source = subprocess.Popen([sys.executable, "-c", SOURCE], stdout=subprocess.PIPE, text=True, env=environment)
    assert source.stdout is not None
    name = source.stdout.readline().strip()
    _, ours = cache_of(30, 2)
    reader, asked = MemoryReader(store_over(ours), MemoryFile.imported), 0

    def kill_in_the_middle() -> bool:
        nonlocal asked
        asked += 1
        if asked == len(BLOCKS) // 2:
            source.send_signal(signal.SIGKILL)
            source.wait()
        return False

    assert reader.pull(order(name, BLOCKS, BLOCKS), kill_in_the_middle) == len(BLOCKS) * PARTS * PIECE
    _, expected = cache_of(30, 1)
    assert np.array_equal(blocks_of(ours[0], BLOCKS), blocks_of(expected[0], BLOCKS))
    until(lambda: not reader.num_mapped)
    with pytest.raises(Unreachable):
        reader.pull(order(name, BLOCKS, BLOCKS), never)


def test_a_short_pull_waits_for_no_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_blocks, "STAGING_BYTES", PARTS * PIECE)
    (memory, regions), (_, ours) = cache_of(30, 1), cache_of(50, 2)
    reader = MemoryReader(store_over(ours), MemoryFile.imported)
    may_go_on, begun = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        may_go_on.wait()
        return False

    with offered(memory, regions, BLOCKS) as server:
        long = threading.Thread(target=reader.pull, args=(order(server.name, BLOCKS, BLOCKS), wait))
        long.start()
        begun.wait()
        assert reader.pull(order(server.name, [1], [50]), never) == PARTS * PIECE
        server.close()  # the memory stays mapped for the long one
        may_go_on.set()
        long.join()
    assert np.array_equal(blocks_of(ours[0], [*BLOCKS, 50]), blocks_of(regions[0], [*BLOCKS, 1]))
    until(lambda: not reader.num_mapped)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("cancelled", [False, True])
def test_chunks_are_launched_ahead_and_all_have_ended_on_return(
    seed: int, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device whose work happens later: ids must not be written again before they are read."""
    monkeypatch.setattr(device_blocks, "STAGING_BYTES", 2 * PARTS * PIECE)
    rng = random.Random(seed)
    device, (_, regions), (_, ours), told = LazyDevice(rng), cache_of(30, 1), cache_of(50, 2), list[int]()
    store = DeviceBlocks(device, lambda: LazyBlockCopies(device), ours, lambda blocks: told.extend(blocks.tolist()))  # type: ignore[arg-type]
    asked, most_ahead = 0, 0

    def is_cancelled() -> bool:
        nonlocal asked, most_ahead
        asked += 1
        most_ahead = max(most_ahead, max(len(stream.work) for stream in device.streams))
        device.advance(rng.randrange(4))
        return cancelled and asked == 8

    sources, targets = (np.array(rng.sample(range(1, most), 20), np.int32) for most in (30, 50))
    before = blocks_of(ours[0], targets.tolist())
    assert store.copy_from(regions, sources, targets, is_cancelled) is not cancelled
    copied = 14 if cancelled else 20
    assert np.array_equal(
        blocks_of(ours[0], targets.tolist())[:copied], blocks_of(regions[0], sources.tolist())[:copied]
    )
    assert np.array_equal(blocks_of(ours[0], targets.tolist())[copied:], before[copied:])
    assert not any(stream.work for stream in device.streams), "something is still to be copied"
    assert most_ahead >= 3 and told == ([] if cancelled else targets.tolist())


class BufferedCopies(HostBlockCopies):
    """Keeps a launch's arguments in one buffer and lets other threads run before it reads them, as `Kernel` may."""

    def _pieces(self, *arguments: Any) -> Iterator[Any]:
        self.buffer = arguments
        time.sleep(0.001)
        return super()._pieces(*self.buffer)


def test_two_pulls_at_once_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_blocks, "STAGING_BYTES", PARTS * PIECE)
    (memory, regions), (_, ours) = cache_of(30, 1), cache_of(50, 2)
    store = DeviceBlocks(HostDevice(), BufferedCopies, ours, lambda blocks: None)
    reader = MemoryReader(store, MemoryFile.imported)
    with offered(memory, regions, BLOCKS) as server:
        orders = [order(server.name, BLOCKS[:10], BLOCKS[:10]), order(server.name, BLOCKS[10:], BLOCKS[10:])]
        pulls = [threading.Thread(target=reader.pull, args=(each, never)) for each in orders]
        for pull in pulls:
            pull.start()
        for pull in pulls:
            pull.join()
    assert np.array_equal(blocks_of(ours[0], BLOCKS), blocks_of(regions[0], BLOCKS))
    until(lambda: not reader.num_mapped)


def test_bytes_of_a_devices_blocks_go_out_and_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_blocks, "STAGING_BYTES", 3 * PARTS * PIECE)
    (_, here), (_, there), told = cache_of(30, 1), cache_of(40, 2), []
    kept: list[int] = told
    data = store_over(here).read(np.array(BLOCKS, np.int32))
    assert np.array_equal(np.frombuffer(data, np.uint8), blocks_of(here[0], BLOCKS).reshape(-1))
    targets = list(range(40, 20, -1))
    store_over(there, kept).write(np.array(targets, np.int32), data)
    assert np.array_equal(blocks_of(there[0], targets), blocks_of(here[0], BLOCKS))
    assert kept == targets
