"""The transport over TCP: right bytes, only granted blocks, known keys, bounded waits, and CURVE."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import zmq

from runner_svc.tiers.block_store import HostBlocks
from runner_svc.transfer.block_reader import BlockReader
from runner_svc.transfer.block_server import BlockServer
from runner_svc.transfer.grants import MOST_GRANTS, Grants
from runner_svc.transfer.transport import PullFailed, PullOrder
from runner_svc.transfer.wire import CHUNK_BYTES, BadFrame, read_reply, read_request, request_frame

NUM_BLOCKS = 64
KEY = secrets.token_bytes(16)


def never() -> bool:
    return False


def store_of(seed: int, parts: int = 3, size: int = 1000, told: list[int] | None = None) -> HostBlocks:
    """Returns a store of two regions with random bytes; `told` receives the blocks that are written."""
    rng = np.random.default_rng(seed)
    regions = [rng.integers(0, 256, (count, NUM_BLOCKS + 1, size), np.uint8) for count in (parts, 1)]
    return HostBlocks(regions, lambda blocks: None if told is None else told.extend(blocks.tolist()))


def order(endpoint: str, sources: list[int], targets: list[int], key: bytes = KEY, server: bytes = b"") -> PullOrder:
    return PullOrder(key, endpoint, server, "", np.array(sources, np.int32), np.array(targets, np.int32))


@contextmanager
def served(store: HostBlocks, granted: list[int], secret: bytes = b"", reader: str = "") -> Iterator[BlockServer]:
    grants = Grants(NUM_BLOCKS)
    grants.add(KEY, np.array(granted, np.int32), reader)
    server = BlockServer(store, grants, "tcp://127.0.0.1:*", secret)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def reading(store: HostBlocks, **options: object) -> Iterator[BlockReader]:
    reader = BlockReader(store, **options)  # type: ignore[arg-type]
    try:
        yield reader
    finally:
        reader.close()


@pytest.mark.parametrize("size", [7, 1000, 300_000])
def test_blocks_arrive_whole_and_no_other_is_written(size: int) -> None:
    written: list[int] = []
    here, there = store_of(1, size=size), store_of(2, size=size, told=written)
    sources, targets = list(range(1, 41)), list(range(NUM_BLOCKS, NUM_BLOCKS - 40, -1))
    everything = np.arange(NUM_BLOCKS + 1, dtype=np.int32)
    before = np.frombuffer(there.read(everything), np.uint8).reshape(len(everything), -1).copy()
    with served(here, sources) as server, reading(there) as reader:
        num_bytes = reader.pull(order(server.endpoint, sources, targets), never)
    assert num_bytes == 40 * there.block_bytes
    after = np.frombuffer(there.read(everything), np.uint8).reshape(len(everything), -1)
    expected = before.copy()
    expected[targets] = np.frombuffer(here.read(np.array(sources, np.int32)), np.uint8).reshape(40, -1)
    assert np.array_equal(after, expected)
    assert sorted(written) == sorted(targets)


def test_what_is_not_granted_is_refused() -> None:
    written: list[int] = []
    here, there = store_of(1), store_of(2, told=written)
    with served(here, [1, 2, 3]) as server, reading(there) as reader:
        with pytest.raises(PullFailed, match="some of the blocks are not granted"):
            reader.pull(order(server.endpoint, [3, 4], [1, 2]), never)
        with pytest.raises(PullFailed, match="the key of the move is unknown here"):
            reader.pull(order(server.endpoint, [1], [1], secrets.token_bytes(16)), never)
        server._grants.remove(KEY)
        with pytest.raises(PullFailed, match="the key of the move is unknown here"):
            reader.pull(order(server.endpoint, [1], [1]), never)
    assert not written


def test_a_silent_source_is_given_up_and_a_cancelled_pull_ends_at_once() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dumb = context.socket(zmq.ROUTER)
    port = dumb.bind_to_random_port("tcp://127.0.0.1")
    try:
        with reading(store_of(2), silence_s=0.3) as reader, pytest.raises(PullFailed, match=r"was silent for 0\.3 s"):
            reader.pull(order(f"tcp://127.0.0.1:{port}", [1], [1]), never)
        with reading(store_of(2), silence_s=60.0) as reader, pytest.raises(PullFailed, match="session"):
            began_at = time.monotonic()
            reader.pull(order(f"tcp://127.0.0.1:{port}", [1], [1]), lambda: time.monotonic() > began_at + 0.1)
    finally:
        context.destroy(0)


@pytest.mark.parametrize(
    "answer",
    [
        lambda frame: (b"RKV1" + frame[4:12] + b"\0", b"too short"),
        lambda frame: (b"RKV1" + bytes(8)[:7] + b"\7\0", bytes(4000)),
        lambda frame: (b"junk", b""),
        lambda frame: (b"",),
        lambda frame: (b"RKV1" + frame[4:12] + b"\5", b""),
    ],
)
def test_a_source_that_answers_nonsense_fails_the_pull(answer: Callable[[bytes], tuple[bytes, ...]]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mad = context.socket(zmq.ROUTER)
    port = mad.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        identity, frame = mad.recv_multipart()
        mad.send_multipart((identity, *answer(frame)))

    thread = threading.Thread(target=serve)
    thread.start()
    written: list[int] = []
    try:
        with reading(store_of(2, told=written), silence_s=5.0) as reader, pytest.raises(PullFailed, match="sent"):
            reader.pull(order(f"tcp://127.0.0.1:{port}", [1], [1]), never)
    finally:
        thread.join()
        context.destroy(0)
    assert not written


def test_a_source_survives_frames_that_nobody_sends() -> None:
    here, there = store_of(1), store_of(2)
    with served(here, [1]) as server:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        noise = context.socket(zmq.DEALER)
        noise.connect(server.endpoint)
        for frame in (b"", b"RKV1", bytes(27), bytes(28), bytes(29), request_frame(0, KEY, np.array([-1], np.int32))):
            noise.send(frame)
        noise.send(request_frame(0, KEY, np.full(200_000, 1, np.int32)))
        with reading(there) as reader:
            assert reader.pull(order(server.endpoint, [1], [2]), never) == there.block_bytes
        context.destroy(0)


def test_only_the_key_that_a_grant_names_connects() -> None:
    here, there = store_of(1), store_of(2)
    (server_public, server_secret), (public, secret), (stranger, strange_secret) = (
        zmq.curve_keypair() for _ in range(3)
    )
    with served(here, [1], server_secret, public.decode()) as server:
        job = order(server.endpoint, [1], [2], server=server_public)
        with reading(there, keys=(secret, public)) as reader:
            assert reader.pull(job, never) == there.block_bytes
        silent = pytest.raises(PullFailed, match="was silent")
        with reading(there, keys=(strange_secret, stranger), silence_s=0.5) as reader, silent:
            reader.pull(job, never)  # it knows the move's key, which does not suffice
        with reading(there, silence_s=0.5) as reader, pytest.raises(PullFailed, match="encrypts"):
            reader.pull(job, never)
        silent = pytest.raises(PullFailed, match="was silent")
        with reading(there, keys=(secret, public), silence_s=0.5) as reader, silent:
            reader.pull(order(server.endpoint, [1], [2], server=stranger), never)  # a machine in the middle


def test_grants_are_bounded_and_checked() -> None:
    grants = Grants(NUM_BLOCKS)
    with pytest.raises(ValueError, match="has 3 bytes, not 16"):
        grants.add(b"abc", np.array([1], np.int32), "")
    for wrong in ([0], [NUM_BLOCKS + 1], [-1]):
        with pytest.raises(ValueError, match="outside 1 to 64"):
            grants.add(KEY, np.array(wrong, np.int32), "")
    for number in range(MOST_GRANTS + 10):
        grants.add(number.to_bytes(16, "little"), np.array([1], np.int32), "someone")
    assert grants.refusal((9).to_bytes(16, "little"), np.array([1], np.int32))
    assert not grants.refusal((10).to_bytes(16, "little"), np.array([1], np.int32))
    assert grants.admits(b"someone") and not grants.admits(b"")
    grants.clear()
    assert not grants.admits(b"someone")


def test_chunks_carry_at_least_a_mebibyte() -> None:
    assert CHUNK_BYTES >= 1 << 20
    with pytest.raises(BadFrame):
        read_request(bytes(28))
    with pytest.raises(BadFrame):
        read_reply(memoryview(bytes(12)))
