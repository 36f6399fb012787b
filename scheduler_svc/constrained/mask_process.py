"""A process that calls the grammar library: `python -m scheduler_svc.constrained.mask_process ROLE GRAMMARS MASKS
MEMORY THREADS SPARE_BYTES NICENESS LIMIT_S`.

`llguidance` is native code on what clients send, and its faults end the process that they happen in. So they happen
here, and the kernel bounds what a grammar may cost: a timer ends the process with SIGALRM when one frame takes too
long, a limit on its data when it takes too much memory. Who asked starts another and finds out which grammar
it was (see `mask_client`).

ROLE is for whoever looks at the processes. GRAMMARS and MASKS are descriptors of sockets, MEMORY that of the shared
memory (see `frames` and `columns`). The first frame on GRAMMARS is the model, a roster.plan.v1.Model, answered by {};
then `MaskServer` answers both, each in a thread of its own. The process ends when either socket is closed.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protos import plan_pb2
from scheduler_svc.constrained.alarm import Alarm
from scheduler_svc.constrained.frames import receive_frame, send_frame
from scheduler_svc.constrained.mask_server import MaskServer


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
    """Serves until the scheduler closes a socket, or is gone."""
    grammars, masks, memory, threads, spare_bytes, niceness = map(int, sys.argv[2:8])
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # they reach a whole process group; the end of a socket is what counts
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    grammar_socket, mask_socket = socket.socket(fileno=grammars), socket.socket(fileno=masks)
    described = receive_frame(grammar_socket)
    if described is None:
        return
    server = MaskServer(plan_pb2.Model.FromString(described), threads, SharedMemory(memory))
    server.prepare()
    alarm = Alarm(float(sys.argv[8]))
    threading.Thread(target=_serve, args=(grammar_socket, server.grammar, alarm), daemon=True).start()
    most = _data_bytes() + spare_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    gc.collect()
    gc.freeze()  # what is here now stays: no collection needs to look at it
    send_frame(grammar_socket, b"{}")
    _serve(mask_socket, server.masks, alarm)


def _serve(stream: socket.socket, answer: Callable[[bytes], bytes], alarm: Alarm) -> None:
    """Answers one frame after another; ends the process with the stream, and with whatever goes wrong."""
    status = 1
    try:
        while (frame := receive_frame(stream)) is not None:
            with alarm:
                body = answer(frame)
            send_frame(stream, body)
        status = 0
    except (ConnectionError, SystemExit):
        status = 0
    finally:  # also a panic of the library, which is no Exception; a traceback would quote what clients sent
        os._exit(status)


def _data_bytes() -> int:
    """Memory of this process's own that it may write, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    main()
