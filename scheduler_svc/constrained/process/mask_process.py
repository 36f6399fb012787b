"""Processes that call the grammar library: `python -m scheduler_svc.constrained.process.mask_process CONTROL`.

`llguidance` is native code on what clients send, and its faults end the process that they happen in. So they happen
here, and the kernel bounds what a grammar may cost: a timer ends the process with SIGALRM when one frame takes too
long, a limit on its data when it takes too much memory. Who asked gets another and finds out which grammar it was (see
`mask_client`).

The process itself only builds the vocabulary, and forks one mask process after another (see `fork_server`). CONTROL is
the descriptor of a socket. Its first frame is the model, a roster.plan.v1.Model, answered by {}; the others are JSON:
  {role, threads, spare_bytes, limit_s, niceness}, with the descriptors of a socket, of its ends of two pipes, and of
      the shared memory: forks a mask process, answered by {pid}. In it `MaskServer` answers about grammars on the
      socket and about masks on the pipes, each in a thread of its own (see `frames`, `pipes` and `columns`); it ends
      when either is closed.
  {wait, patience_s}: waits so long for the end of that process, then kills it; answered by {status}.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2
from scheduler_svc.constrained.frames import LENGTH, Stream, receive_frame, send_frame
from scheduler_svc.constrained.pipes import AnsweringPipes
from scheduler_svc.constrained.process.alarm import Alarm
from scheduler_svc.constrained.process.compiler import GrammarCompiler
from scheduler_svc.constrained.process.mask_server import MaskServer
from scheduler_svc.constrained.source import UnusableGrammar

POLL_S = 0.002
NUM_DESCRIPTORS = 4


class SharedMemory:
    """Memory that the scheduler reads; it grows there, and is mapped anew here when more of it is needed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._words = np.zeros(0, np.uint32)

    def __call__(self, words: int) -> npt.NDArray[np.uint32]:
        """The first so many uint32."""
        if words > len(self._words):
            size = os.fstat(self._descriptor).st_size
            self._words = np.frombuffer(mmap.mmap(self._descriptor, size), np.uint32)
        return self._words[:words]


def main() -> None:
    """Forks until the scheduler closes the socket, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # they reach a whole process group; the end of a socket is what counts
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    control = socket.socket(fileno=int(sys.argv[1]))
    described = receive_frame(control)
    if described is None:
        return
    model = plan_pb2.Model.FromString(described)
    compiler = GrammarCompiler(model)
    with contextlib.suppress(UnusableGrammar):  # which is told with each grammar
        compiler.prepare()
    gc.collect()
    gc.freeze()  # what is here now stays, and is shared with all that is forked
    send_frame(control, b"{}")
    while (asked := _receive(control)) is not None:
        frame, descriptors = asked
        if "wait" in frame:
            answer = {"status": _wait(frame["wait"], frame["patience_s"])}
        else:
            pid = os.fork()
            if not pid:
                control.close()
                serve(MaskServer(model, frame["threads"], SharedMemory(descriptors[3]), compiler), frame, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = {"pid": pid}
        send_frame(control, json.dumps(answer).encode())


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One frame and the descriptors that came with it; None at the end."""
    data, descriptors, _, _ = socket.recv_fds(control, 4096, NUM_DESCRIPTORS)
    if len(data) < LENGTH.size:
        return None
    return json.loads(data[LENGTH.size :]), descriptors


def _wait(pid: int, patience_s: float) -> int:
    until_at = time.monotonic() + patience_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until_at:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(POLL_S)


def serve(server: MaskServer, frame: dict[str, Any], descriptors: list[int]) -> None:
    """Answers the socket and the pipes within the limits of the frame. Never returns."""
    Path("/proc/self/comm").write_text(f"roster-{frame['role']}"[:15])
    os.nice(frame["niceness"])
    alarm = Alarm(frame["limit_s"])
    grammars, masks = socket.socket(fileno=descriptors[0]), AnsweringPipes(*descriptors[1:3])
    limited = threading.Event()

    def answer_grammars() -> None:
        limited.wait()
        _answer_all(grammars, server.grammar, alarm)

    threading.Thread(target=answer_grammars, daemon=True).start()  # its stack does not count
    most = _data_bytes() + frame["spare_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    limited.set()
    _answer_all(masks, server.masks, alarm)


def _answer_all(stream: Stream, answer: Callable[[bytes], bytes], alarm: Alarm) -> None:
    """Answers one frame after another; ends the process with the stream, and with whatever goes wrong."""
    status = 1
    try:
        while (frame := receive_frame(stream)) is not None:
            with alarm:
                send_frame(stream, answer(frame))
        status = 0
    except ConnectionError:
        status = 0
    finally:  # also a panic of the library, which is no Exception; a traceback would quote what clients sent
        os._exit(status)


def _data_bytes() -> int:
    """Memory of this process's own that it may write, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    main()
