"""Processes that call the grammar library: `python -m scheduler_svc.constrained.process.mask_process CONTROL`.

`llguidance` is native code that processes client input, and a fault in it ends the process. So it runs here, and the
kernel bounds a grammar's cost: a timer ends the process with SIGALRM when one frame takes too long, and RLIMIT_DATA
when it takes too much memory. The scheduler then starts another process and finds the offending grammar (see
`mask_client`).

The main process only builds the vocabulary, and forks one mask process after another (see `fork_server`). CONTROL is
the descriptor of a socket. Its first frame is the model, a roster.plan.v1.Model, answered by {}; the others are JSON:
  {role, threads, spare_bytes, limit_s, niceness}, with the descriptors of a socket, of the process's ends of two pipes,
      and of the shared memory: forks a mask process; answered by {pid}. There `MaskServer` answers requests about
      grammars on the socket and about masks on the pipes, each in a thread of its own (see `frames`, `pipes` and
      `columns`). The process ends when either is closed.
  {wait, patience_s}: waits `patience_s` for the process `wait` to end, then kills it; answered by {status}.
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
"""Interval at which the end of a forked process is looked for."""
NUM_DESCRIPTORS = 4
"""Maximum number of file descriptors sent with a frame: a socket, two ends of pipes and shared memory."""


class SharedMemory:
    """Memory that the scheduler reads. The scheduler grows it; this end maps it again when it needs more of it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._words = np.zeros(0, np.uint32)

    def __call__(self, words: int) -> npt.NDArray[np.uint32]:
        """Returns the first `words` uint32."""
        if words > len(self._words):
            size = os.fstat(self._descriptor).st_size
            self._words = np.frombuffer(mmap.mmap(self._descriptor, size), np.uint32)
        return self._words[:words]


def main() -> None:
    """Forks processes until the scheduler closes the socket or is gone."""
    # These signals reach the whole process group; this process ends with the socket instead.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    control = socket.socket(fileno=int(sys.argv[1]))
    described = receive_frame(control)
    if described is None:
        return
    model = plan_pb2.Model.FromString(described)
    compiler = GrammarCompiler(model)
    with contextlib.suppress(UnusableGrammar):  # each grammar reports it again
        compiler.prepare()
    gc.collect()
    gc.freeze()  # keeps the present objects unwritten, so that all forked processes share their pages
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
    """Receives one frame and the descriptors sent with it; returns None at the end."""
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
    """Answers requests on the socket and the pipes within the limits given in `frame`. Never returns."""
    Path("/proc/self/comm").write_text(f"roster-{frame['role']}"[:15])
    os.nice(frame["niceness"])
    alarm = Alarm(frame["limit_s"])
    grammars, masks = socket.socket(fileno=descriptors[0]), AnsweringPipes(*descriptors[1:3])
    limited = threading.Event()

    def answer_grammars() -> None:
        limited.wait()
        _answer_all(grammars, server.grammar, alarm)

    # Started before the limit is set, so that its stack does not count.
    threading.Thread(target=answer_grammars, daemon=True).start()
    most = _data_bytes() + frame["spare_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    limited.set()
    _answer_all(masks, server.masks, alarm)


def _answer_all(stream: Stream, answer: Callable[[bytes], bytes], alarm: Alarm) -> None:
    """Answers one frame after another; ends the process when the stream ends or anything fails."""
    status = 1
    try:
        while (frame := receive_frame(stream)) is not None:
            with alarm:
                send_frame(stream, answer(frame))
        status = 0
    except ConnectionError:
        status = 0
    finally:  # also after a panic of the library, which is no Exception; a traceback would quote client input
        os._exit(status)


def _data_bytes() -> int:
    """Returns the size of this process's private writable memory, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    main()
