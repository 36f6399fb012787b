"""Pipes to a mask process that dies, hangs or is closed at each position of a frame and of its answer.

The process is a thread here, which has the ends that a process would have.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from array import array
from collections.abc import Callable

import pytest

from scheduler_svc.constrained import mask_handle
from scheduler_svc.constrained.columns import MaskAsk
from scheduler_svc.constrained.fork_server import ForkServer, Limits
from scheduler_svc.constrained.frames import LENGTH, receive_frame, send_frame
from scheduler_svc.constrained.mask_handle import Channel, Died, DiedBefore, MaskHandle
from scheduler_svc.constrained.pipes import AnsweringPipes

LIMIT_S = 0.3
LONG = bytes(range(256)) * 1024
"""Four times the capacity of a pipe."""
SEGV = -signal.SIGSEGV

Act = Callable[[AnsweringPipes], None]


class Threads(ForkServer):
    """Forks threads: the first runs `act`, later ones echo each frame."""

    def __init__(self, act: Act) -> None:
        self._acts = [act]
        self._gone: list[threading.Event] = []
        self.patience_s: list[float] = []

    def fork(self, role: str, threads: int, limits: Limits, descriptors: list[int]) -> int:
        held = [os.dup(each) for each in descriptors[:3]]
        act = self._acts.pop() if self._acts else echo
        gone = threading.Event()

        def run() -> None:
            with socket.socket(fileno=held[0]) as grammars:
                grammars.setblocking(True)
                making = AnsweringPipes(*held[1:])
                act(making)
                making.close()
            gone.set()

        threading.Thread(target=run, daemon=True).start()
        self._gone.append(gone)
        return len(self._gone)

    def wait(self, pid: int, patience_s: float) -> int:
        self.patience_s.append(patience_s)
        return SEGV if self._gone[pid - 1].wait(patience_s) else -signal.SIGKILL

    def has_gone(self, pid: int) -> None:
        assert self._gone[pid - 1].wait(20)


def echo(pipes: AnsweringPipes) -> None:
    while (frame := receive_frame(pipes)) is not None:
        send_frame(pipes, frame)


def echo_once(pipes: AnsweringPipes) -> None:
    send_frame(pipes, receive_frame(pipes) or b"")


def half_an_answer(pipes: AnsweringPipes) -> None:
    frame = receive_frame(pipes) or b""
    pipes.sendall((LENGTH.pack(len(frame)) + frame)[: 2 + len(frame) // 2])


def goes_over_a_frame(pipes: AnsweringPipes) -> None:
    receive_frame(pipes)


def goes_within_a_frame(pipes: AnsweringPipes) -> None:
    pipes.recv(100)


def goes_at_once(pipes: AnsweringPipes) -> None:
    pass


def hangs(pipes: AnsweringPipes) -> None:
    time.sleep(20 * LIMIT_S)


def hangs_over_a_frame(pipes: AnsweringPipes) -> None:
    receive_frame(pipes)
    hangs(pipes)


def hangs_within_an_answer(pipes: AnsweringPipes) -> None:
    half_an_answer(pipes)
    hangs(pipes)


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_handle, "GRACE_S", 0.0)


def handle_of(act: Act, limit_s: float = LIMIT_S) -> tuple[MaskHandle, Threads]:
    server = Threads(act)
    return MaskHandle("masks", server, 1, Limits(spare_bytes=0, limit_s=limit_s)), server


def assert_the_next_answers(handle: MaskHandle) -> None:
    generation = handle.start()
    assert handle.ask(Channel.MASKS, generation, LONG) == LONG
    handle.close()


@pytest.mark.parametrize("frame", [b"", b"mask", LONG], ids=["empty", "short", "long"])
def test_frames_go_there_and_back(frame: bytes) -> None:
    handle, _ = handle_of(echo, limit_s=20)
    generation, called = handle.start(), []
    for _ in range(3):
        assert handle.ask(Channel.MASKS, generation, frame, meanwhile=lambda: called.append(1)) == frame
    assert len(called) == 3 and handle.running == generation
    handle.close()
    assert not handle.running


@pytest.mark.parametrize("act", [half_an_answer, goes_over_a_frame])
@pytest.mark.parametrize("frame", [b"mask", LONG[:50_000]], ids=["short", "long"])
def test_one_that_goes_over_a_frame(act: Act, frame: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its answer is half written."""
    monkeypatch.setattr(mask_handle, "GRACE_S", 20.0)
    handle, _ = handle_of(act)
    with pytest.raises(Died) as death:
        handle.ask(Channel.MASKS, handle.start(), frame)
    assert death.value.status == SEGV and not isinstance(death.value, DiedBefore)
    assert handle.deaths == 1 and not handle.running
    assert_the_next_answers(handle)


def test_one_that_goes_within_a_long_frame_has_seen_something_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_handle, "GRACE_S", 20.0)
    handle, _ = handle_of(goes_within_a_frame)
    with pytest.raises(Died) as death:
        handle.ask(Channel.MASKS, handle.start(), LONG)
    assert not isinstance(death.value, DiedBefore)
    assert_the_next_answers(handle)


@pytest.mark.parametrize(("act", "blames"), [(echo_once, False), (goes_at_once, True)])
def test_one_that_was_gone_before(act: Act, blames: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is not at fault, unless none was ever answered: retries must end if each process dies at once."""
    monkeypatch.setattr(mask_handle, "GRACE_S", 20.0)
    handle, server = handle_of(act)
    generation = handle.start()
    if not blames:
        assert handle.ask(Channel.MASKS, generation, b"mask") == b"mask"
    server.has_gone(1)
    with pytest.raises(Died) as death:
        handle.ask(Channel.MASKS, generation, b"mask")
    assert isinstance(death.value, DiedBefore) != blames
    assert_the_next_answers(handle)


@pytest.mark.parametrize("act", [hangs, hangs_over_a_frame, hangs_within_an_answer])
@pytest.mark.parametrize("frame", [b"mask", LONG], ids=["short", "long"])
def test_one_that_hangs_is_noticed(act: Act, frame: bytes) -> None:
    """At any position; it gets no more time to end by itself."""
    handle, server = handle_of(act)
    began_at = time.monotonic()
    with pytest.raises(Died) as death:
        handle.ask(Channel.MASKS, handle.start(), frame)
    assert time.monotonic() - began_at >= LIMIT_S
    assert death.value.status == -signal.SIGKILL and server.patience_s == [0.0]
    assert_the_next_answers(handle)


def test_closing_ends_the_wait_and_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    asked, outcome = threading.Event(), list[int]()

    def waits_for_the_end(pipes: AnsweringPipes) -> None:
        receive_frame(pipes)
        asked.set()
        assert not pipes.recv(1)  # the scheduler's end is closed

    handle, server = handle_of(waits_for_the_end, limit_s=60)

    def ask() -> None:
        try:  # `pytest.raises` would keep the stack frames and the objects that they refer to
            handle.ask(Channel.MASKS, handle.start(), b"mask")
        except Died as death:
            outcome.append(death.status)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(20)
    handle.close()
    thread.join(20)
    assert outcome
    server.has_gone(1)
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("tokens", [[[5], [7]], [[5], []], [[5], [6, 7]], [[], []], []])
@pytest.mark.parametrize("dropped", [[], [1 << 40]])
def test_what_is_asked_is_read_as_it_was_written(tokens: list[list[int]], dropped: list[int]) -> None:
    ids = list(range(3, 3 + len(tokens)))
    choices: list[list[list[int]]] = [[], [[9], []], [[], []], [[1], [2]]]
    for drafts in choices:
        if drafts and not tokens:
            continue
        for forced in (False, True):
            ask = MaskAsk(array("q", ids), tokens, drafts, forced, dropped)
            read = MaskAsk.decode(ask.encode())
            assert list(read.ids) == ids and read.tokens == tokens and read.forced == forced
            assert list(read.dropped) == dropped and [list(each) for each in read.drafts] == (
                drafts if any(drafts) else []
            )
            assert read.num_positions == ask.num_positions
