"""Moves by NIXL, with an agent of this process in its place, and with the library itself where it is installed."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from runner_svc.tiers.block_store import HostBlocks
from runner_svc.transfer import nixl_reader
from runner_svc.transfer.block_reader import BlockReader
from runner_svc.transfer.block_server import BlockServer
from runner_svc.transfer.grants import Grants
from runner_svc.transfer.nixl_agent import Agent, NixlAgent, NixlMissing, Staging, device_in
from runner_svc.transfer.nixl_reader import NixlReader
from runner_svc.transfer.nixl_source import (
    BUSY,
    LATE,
    LEASE_S,
    REFUSED,
    RETURNED,
    STAGED,
    NixlSource,
    ask_frame,
    read_answer,
    return_frame,
)
from runner_svc.transfer.transport import PullFailed, PullOrder, Unreachable
from runner_svc.transfer.wire import BadFrame
from tests.support.fake_nixl import FakeAgent

NUM_BLOCKS, SIZE, PARTS = 64, 100, 4
BLOCK_BYTES = SIZE * PARTS
PLACE_BYTES = 5 * BLOCK_BYTES + 7
KEY = b"the key of a test"[:16]
SOURCES, TARGETS = list(range(1, 33)), list(range(NUM_BLOCKS, NUM_BLOCKS - 32, -1))


def never() -> bool:
    return False


def store_of(seed: int) -> HostBlocks:
    data = np.random.default_rng(seed).integers(0, 256, (PARTS, NUM_BLOCKS + 1, SIZE), np.uint8)
    return HostBlocks([data], lambda blocks: None)


def blocks_of(store: HostBlocks, blocks: list[int]) -> bytes:
    return bytes(store.read(np.array(blocks, np.int32)))


def order(endpoint: str, memory: str, key: bytes = KEY, server: bytes = b"") -> PullOrder:
    return PullOrder(key, endpoint, server, memory, np.array(SOURCES, np.int32), np.array(TARGETS, np.int32))


@dataclass(eq=False)
class Pair:
    """A source and a target."""

    source_agent: Agent
    target_agent: Agent
    granted: list[int] = field(default_factory=lambda: SOURCES)
    here: HostBlocks = field(default_factory=lambda: store_of(1))
    there: HostBlocks = field(default_factory=lambda: store_of(2))

    def __post_init__(self) -> None:
        grants = Grants(NUM_BLOCKS)
        grants.add(KEY, np.array(self.granted, np.int32), "")
        self.staged = Staging(self.source_agent, PLACE_BYTES, 6)
        self.source = NixlSource(self.staged, self.here, grants)
        self.server = BlockServer(self.here, grants, "tcp://127.0.0.1:*", b"", self.source.answer)
        self.tcp = BlockReader(self.there, silence_s=1.0)
        self.read = Staging(self.target_agent, PLACE_BYTES, 6)
        self.reader = NixlReader(self.target_agent, self.read, self.there, self.tcp)

    def pull(self, is_cancelled: Callable[[], bool] = never, key: bytes = KEY) -> int:
        return self.reader.pull(order(self.server.endpoint, self.source_agent.name, key), is_cancelled)


@contextmanager
def pair(source: Agent, target: Agent, **options: list[int]) -> Iterator[Pair]:
    made = Pair(source, target, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.server.close()
        made.tcp.close()


def until(happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_blocks_arrive_whole_in_chunks_and_all_places_are_free_again() -> None:
    with pair(FakeAgent(), FakeAgent()) as one:
        for _ in range(2):
            assert one.pull() == 32 * BLOCK_BYTES
            assert blocks_of(one.there, TARGETS) == blocks_of(one.here, SOURCES)
        until(lambda: one.staged.num_free == 6)
        assert one.read.num_free == 6


def test_what_is_not_granted_is_not_staged() -> None:
    with pair(FakeAgent(), FakeAgent(), granted=SOURCES[:-1]) as one:
        before = blocks_of(one.there, [TARGETS[-1]])
        with pytest.raises(PullFailed, match="some of the blocks are not granted"):
            one.pull()
        with pytest.raises(PullFailed, match="the key of the move is unknown"):
            one.pull(key=secrets.token_bytes(16))
        assert blocks_of(one.there, [TARGETS[-1]]) == before and one.read.num_free == 6


def test_another_transport_may_reach_a_source_without_nixl() -> None:
    with pair(FakeAgent(), FakeAgent()) as one, pytest.raises(Unreachable, match="does not move blocks by NIXL"):
        one.reader.pull(order(one.server.endpoint, "boot/abc"), never)


def test_a_read_that_is_given_up_keeps_its_place_until_it_has_ended() -> None:
    target = FakeAgent()
    target.is_slow = True
    with pair(FakeAgent(), target) as one:
        before = blocks_of(one.there, TARGETS)
        with pytest.raises(PullFailed, match="session of the scheduler is over"):
            one.pull(lambda: len(target.reads) >= 2)
        assert 6 - one.read.num_free == len(target.reads) >= 2
        target.is_slow = False
        one.reader.pull(order(one.server.endpoint, one.source_agent.name), never)  # beside them
        assert blocks_of(one.there, TARGETS) == blocks_of(one.here, SOURCES) != before
        for read in target.reads:
            read.is_done = True
        one.pull()
        assert one.read.num_free == 6


def test_with_all_places_kept_another_transport_is_tried() -> None:
    with pair(FakeAgent(), FakeAgent()) as one:
        while one.read.take() is not None:
            pass
        with pytest.raises(Unreachable, match="all places"):
            one.pull()


def test_with_all_places_of_the_source_taken_another_transport_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_reader, "_BUSY_S", 0.05)
    with pair(FakeAgent(), FakeAgent()) as one:
        places = [one.staged.take() for _ in range(6)]
        with pytest.raises(Unreachable, match="all places of the source"):
            one.pull()
        assert one.read.num_free == 6
        one.staged.give_back(places[0] or 0)
        assert one.pull() == 32 * BLOCK_BYTES, "one place is enough"


def test_a_lost_source_fails_the_pull_and_is_met_anew() -> None:
    target = FakeAgent()
    with pair(FakeAgent(), target) as one:
        target.fails = True
        with pytest.raises(PullFailed, match="REMOTE_DISCONNECT"):
            one.pull()
        assert not target.met and one.read.num_free == 6
        target.fails = False
        one.pull()
        assert target.met == {one.source_agent.name}


def test_a_silent_source_is_given_up() -> None:
    with pair(FakeAgent(), FakeAgent()) as one:
        one.server.close()
        with pytest.raises(PullFailed, match="nothing came from"):
            one.pull()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_lease_ends_with_its_return_or_its_time_and_the_reader_hears_which() -> None:
    clock, store, grants = Clock(), store_of(1), Grants(NUM_BLOCKS)
    grants.add(KEY, np.array([1, 2], np.int32), "")
    staging = Staging(FakeAgent(), PLACE_BYTES, 1)
    source = NixlSource(staging, store, grants, clock)

    def says(frame: bytes) -> tuple[int, int]:
        answer = source.answer(frame)
        assert answer is not None
        _, what, lease, _ = read_answer(answer[0])
        return what, lease

    ask = ask_frame(1, KEY, np.array([1], np.int32))
    assert says(ask) == (STAGED, 1) and bytes(staging.bytes_of(0, BLOCK_BYTES)) == blocks_of(store, [1])
    assert says(ask)[0] == BUSY
    clock.now_s = LEASE_S
    assert says(ask_frame(2, KEY, np.array([2], np.int32))) == (STAGED, 2)
    assert says(return_frame(1, 1))[0] == LATE and says(return_frame(2, 2))[0] == RETURNED
    assert says(return_frame(2, 2))[0] == LATE and staging.num_free == 1
    assert says(ask_frame(3, KEY, np.array([1] * 6, np.int32)))[0] == REFUSED
    assert source.answer(b"RKV1 and so on") is None
    for frame in (ask[:-1], ask[:28]):
        with pytest.raises(BadFrame):
            source.answer(frame)


def test_bytes_of_a_lease_that_did_not_hold_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(FakeAgent(), FakeAgent()) as one:
        before = blocks_of(one.there, TARGETS)
        monkeypatch.setattr(nixl_reader, "return_frame", lambda number, lease: return_frame(number, lease + 1000))
        with pytest.raises(PullFailed, match="staged other blocks"):
            one.pull()
        assert blocks_of(one.there, TARGETS) == before and one.read.num_free == 6


@pytest.mark.parametrize("frames", [[b"x"], [b"x", b""], [b"RKN3" + bytes(25), b""]])
def test_answers_of_nobody_fail_the_pull(frames: list[bytes]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("tcp://127.0.0.1:*")
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def answer() -> None:
        with suppress(zmq.ZMQError):
            socket.send_multipart([socket.recv_multipart()[0], *frames])

    thread = threading.Thread(target=answer)
    thread.start()
    tcp, agent = BlockReader(store_of(2), silence_s=0.2), FakeAgent()
    reader = NixlReader(agent, Staging(agent, PLACE_BYTES, 6), store_of(2), tcp)
    with pytest.raises(PullFailed):
        reader.pull(order(endpoint, "nixl:x"), never)
    thread.join()
    socket.close()
    context.term()
    tcp.close()


def test_the_device_is_that_of_the_network() -> None:
    addresses = [("lo", "127.0.0.1"), ("eth0", "192.168.1.4"), ("ib0", "10.1.0.7")]
    assert device_in("10.1.0.0/16", addresses) == "ib0" and device_in("127.0.0.0/8") == "lo"
    with pytest.raises(NixlMissing, match=r"move_network is '10\.2\.0\.0/16', where this machine has no IPv4 address"):
        device_in("10.2.0.0/16", addresses)


def test_without_the_library_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", None)
    with pytest.raises(NixlMissing, match=r"not installed .*pip install 'roster-serve\[nixl-cu13\]'"):
        NixlAgent("lo")


class Disconnected(Exception):
    """As the library's errors, which are no RuntimeError."""


def library(monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]) -> None:
    """Installs a library whose calls named `broken` fail."""

    class LibraryAgent:
        def __init__(self, name: str, config: object) -> None:
            pass

        def __getattr__(self, call: str) -> Callable[..., Any]:
            def answer(*arguments: Any) -> object:
                if call in broken:
                    raise Disconnected("NIXL_ERR_REMOTE_DISCONNECT")
                return arguments[0] if call == "add_remote_agent" else b"PROC"

            return answer

    for name in ("UCX_NET_DEVICES", "UCX_TLS", "NIXL_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
    sync = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=None)
    api = SimpleNamespace(nixl_agent=LibraryAgent, nixl_agent_config=dict, nixl_thread_sync_t=sync)
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", api)


@pytest.mark.parametrize("call", ["add_remote_agent", "initialize_xfer", "transfer", "check_xfer_state"])
def test_whatever_the_library_raises_the_pull_fails_and_the_peer_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    library(monkeypatch, (call, "remove_remote_agent", "release_xfer_handle"))
    with pair(FakeAgent(), NixlAgent("lo")) as one:
        with pytest.raises(PullFailed, match="NIXL: Disconnected: NIXL_ERR_REMOTE_DISCONNECT"):
            one.pull()
        assert one.read.num_free == 6 and not one.reader._met


def test_memory_that_cant_be_offered_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, ("register_memory",))
    with pytest.raises(NixlMissing, match=r"can't offer 1 MiB .*Disconnected.*ulimit -l"):
        Staging(NixlAgent("lo"), 1 << 20, 1)


def test_a_reader_knows_a_bounded_number_of_peers() -> None:
    """A runner that starts again is another agent; the one before says nothing."""
    agent = FakeAgent()
    reader = NixlReader(agent, Staging(agent, PLACE_BYTES, 1), store_of(1), BlockReader(store_of(1)))
    for number in range(200):
        reader.meet("often", b"often")
        reader.meet(f"nixl:{number}", f"nixl:{number}".encode())
    assert len(agent.met) == nixl_reader._MOST_MET and {"often", "nixl:199"} <= agent.met
    with pytest.raises(PullFailed, match="another agent"):
        reader.meet("nixl:x", b"nixl:y")
    assert "nixl:y" not in agent.met


# ------------------------------------------------------------------ the library itself

SOURCE = """
import sys, time
from tests.runner_svc.transfer.test_nixl_transport import *
one = Pair(NixlAgent("lo"), FakeAgent())
print(one.server.endpoint, one.source_agent.name, flush=True)
time.sleep(60)
"""


def test_nixl_itself_copies_between_processes_and_shows_a_killed_source() -> None:
    pytest.importorskip("nixl_cu13")
    process = subprocess.Popen([sys.executable, "-c", SOURCE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = ""
        while "nixl:" not in line:
            line = process.stdout.readline()
        endpoint, name = line.split()
        agent, here, there = NixlAgent("lo"), store_of(1), store_of(2)
        tcp = BlockReader(there, silence_s=20.0)
        reader = NixlReader(agent, Staging(agent, PLACE_BYTES, 6), there, tcp)
        for _ in range(2):
            assert reader.pull(order(endpoint, name), never) == 32 * BLOCK_BYTES
            assert blocks_of(there, TARGETS) == blocks_of(here, SOURCES)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        tcp.silence_s = 2.0
        with pytest.raises(PullFailed):
            reader.pull(order(endpoint, name), never)
        tcp.close()
    finally:
        process.kill()
        process.wait()
