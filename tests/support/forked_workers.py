"""Runs pytest with xdist's workers forked from one process that has imported all test modules.

    python -m tests.support.forked_workers -n 4 --dist loadfile

By default each worker is a new interpreter that imports torch, transformers and every test module, and rewrites their
assertions: in a fresh clone 10 to 20 seconds of processor time per worker. Here one process collects the tests, and a
worker is a fork of it, which runs pytest as usual but finds its modules imported. Arguments are pytest's.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import types
from collections.abc import Sequence

from tests.support import fork_server


def _template(control: socket.socket, arguments: Sequence[str]) -> None:
    """Imports the services and the tests, then forks a worker for each pair of pipes received, until the end of file.

    Returns in a worker, whose stdin and stdout are the pipes.
    """
    import pytest

    zygotes = fork_server.start_zygotes()
    output = os.dup(1)
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    pytest.main([*arguments, "-n0", "--collect-only", "-q", "-p", "no:cacheprovider"])  # a worker reports any error
    os.dup2(output, 1)
    os.close(output)
    gc.collect()
    gc.freeze()
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller ends the workers, and so this process
    workers = []
    while True:
        _, pipes, _, _ = socket.recv_fds(control, 1, 2)
        if not pipes:
            for pid in workers:
                os.waitpid(pid, 0)
            for zygote in zygotes:
                zygote.wait()
            os._exit(0)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGINT, interrupted)
            control.close()
            for place, pipe in enumerate(pipes):
                os.dup2(pipe, place)
                os.close(pipe)
            return
        for pipe in pipes:
            os.close(pipe)
        workers.append(pid)
        control.send(str(pid).encode())


def _work() -> None:
    """Does what execnet's `python -u -c` does in a worker, as a main module without this file's name."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = ["-c"]
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
    exec(eval(sys.stdin.readline()), vars(main))


def _fork_workers(control: socket.socket) -> None:
    """Makes execnet request its local workers at the other end of the socket."""
    from execnet import gateway_io
    from execnet.gateway_base import Popen2IO

    class ForkedIO(Popen2IO):
        """The ends of a worker's pipes, and the worker's process."""

        def __init__(self, execmodel: object) -> None:
            their_in, our_out = os.pipe()
            our_in, their_out = os.pipe()
            socket.send_fds(control, [b"."], [their_in, their_out])
            os.close(their_in)
            os.close(their_out)
            answer = control.recv(32)
            if not answer:
                raise RuntimeError("the process that forks workers has ended")
            self._process = os.pidfd_open(int(answer))
            super().__init__(open(our_out, "wb"), open(our_in, "rb"), execmodel=execmodel)  # noqa: SIM115

        def wait(self) -> None:
            select.select([self._process], [], [])

        def kill(self) -> None:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    create_io = gateway_io.create_io
    gateway_io.create_io = lambda spec, execmodel: ForkedIO(execmodel) if spec.popen else create_io(spec, execmodel)


def main() -> int:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template = os.fork()
    if not template:
        ours.close()
        _template(theirs, sys.argv[1:])
        _work()
        return 0
    theirs.close()
    import pytest

    _fork_workers(ours)
    status = pytest.main()
    ours.close()
    os.waitpid(template, 0)
    return status


if __name__ == "__main__":
    sys.exit(main())
