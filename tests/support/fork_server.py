"""Starts service processes by forking one that has already imported the libraries.

A scheduler's or runner's imports take more than a second of processor time, and tests start hundreds of them. Here each
is a fork of a process that has imported MODULES, and `python -m MODULE` is run in it. No module of Roster may draw a
random constant at import, which all would share. A scheduler's first worker is forked before the scheduler's own code
runs; it starts later workers itself. All processes started here end with the process that asked for them, even if that
process is killed.

    process = start("runner_svc.main", ["--device=hash"], environment, log)

With `fresh`, a new interpreter replaces the fork, as with `python -m`; ROSTER_TEST_FULL=1 does so everywhere.

What computes with torch comes from a second server, which has imported torch too: `Kind.TORCH`.

A server is a new interpreter, or a fork of a process that `start_zygotes` leaves behind: then all processes that
were forked from the caller share one import of MODULES, and one of torch, when it is asked for first.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import enum
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner_svc.arithmetic.instruction_set import PINNED, pin
from runner_svc.launch import forking
from tests.support.thoroughness import FULL

MODULES = (
    "google.protobuf.json_format",
    "google.rpc.error_details_pb2",
    "grpc_status.rpc_status",
    "jinja2.sandbox",
    "rich.progress",
    "runner_svc.service",
    "scheduler_svc.front.worker",
    "scheduler_svc.operation.service",
)
"""What a scheduler and a hash runner import at startup. Not torch, before which a runner pins its instruction set."""

_OF_THE_START = ("PYTHON", "LD_", "OMP_", "GRPC_", "MALLOC_")
"""Prefixes of variables that are read before a program's first statement runs."""

_DETERMINISTIC = "--deterministic"
ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1
_PACKET = 1 << 17


class Kind(enum.Enum):
    """What a server has imported."""

    PLAIN = "plain"
    TORCH = "torch"
    """MODULES and those of `import_torch`; a pinned instruction set is seen only by what asks for it."""


class ServiceProcess:
    """The part of `subprocess.Popen` that tests use, for a process that is the fork server's child."""

    def __init__(self, pid: int, client: _Client) -> None:
        self.pid = pid
        self._client = client

    @property
    def returncode(self) -> int | None:
        """Exit status as of the last `poll` or `wait`."""
        return self._client.ended.get(self.pid)

    def poll(self) -> int | None:
        """Returns the exit status (-N for signal N), or None while the process runs."""
        self._client.receive()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the process to end and returns its exit status. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal; does nothing if the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkedWorker:
    """The part of `subprocess.Popen` that the scheduler uses, for a worker forked from it."""

    def __init__(self, pid: int, stdin: int) -> None:
        self.pid = pid
        self.stdin = open(stdin, "wb")  # noqa: SIM115
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status (-N for signal N), or None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    wait = ServiceProcess.wait

    def kill(self) -> None:
        """Kills the process; does nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    fresh: bool = FULL,
    kind: Kind = Kind.PLAIN,
) -> ServiceProcess:
    """Runs `python -m module` without stdin, in a session of its own; its output is appended to the log."""
    return _client(kind).start(module, arguments, environment, log, fresh)


class _Client:
    """The requesting end of the connection to the fork server."""

    def __init__(self, kind: Kind) -> None:
        self.ended: dict[int, int] = {}
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if _zygotes:
                self._environment = _zygotes[kind].environment
                _zygotes[kind].fork_server(theirs)
                return
            command = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), kind.value]
            self._environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._environment,
                cwd=ROOT,
                start_new_session=True,
            )

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, fresh: bool
    ) -> ServiceProcess:
        fresh = fresh or _of_the_start(environment) != _of_the_start(self._environment)
        asked = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "log": str(log.absolute()),
            "folder": os.getcwd(),
            "fresh": fresh,
        }
        with self._lock:
            self._socket.send(json.dumps(asked).encode())
            while (pid := self._take()) is None:
                pass
            self.ended.pop(pid, None)  # drop the status of an earlier process with this pid
            return ServiceProcess(pid, self)

    def receive(self) -> None:
        """Reads the server's messages about processes that have ended."""
        with self._lock:
            while select.select([self._socket], [], [], 0)[0]:
                self._take()

    def _take(self) -> int | None:
        """Waits for one message; returns the pid if it reports a started process."""
        packet = self._socket.recv(_PACKET)
        assert packet, "the fork server has ended"
        told = json.loads(packet)
        if "status" not in told:
            return int(told["pid"])
        self.ended[told["pid"]] = told["status"]
        return None

    def close(self) -> None:
        """Ends the server and with it all processes that it started."""
        self._socket.shutdown(socket.SHUT_WR)
        while self._socket.recv(_PACKET):
            pass
        self._socket.close()


class Zygote:
    """A process that has imported MODULES, of which servers are forked; it ends with the last process that knows it."""

    def __init__(self, kind: Kind, others: Sequence[Zygote]) -> None:
        """`others`: those that the process is not to know."""
        self.environment = dict(os.environ)
        """The environment in which MODULES were imported."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        import_modules()
        self._pid = os.fork()
        if not self._pid:
            for zygote in (self, *others):
                zygote._socket.close()
            self._wait(theirs, kind)
        theirs.close()

    def fork_server(self, control: socket.socket) -> None:
        """Starts a server at this end of its control socket."""
        socket.send_fds(self._socket, [b"."], [control.fileno()])

    def wait(self) -> None:
        """Waits for the end of all other processes that know it, and of it."""
        self._socket.close()
        os.waitpid(self._pid, 0)

    @staticmethod
    def _wait(requests: socket.socket, kind: Kind) -> None:
        """Forks a server for each socket received; does not return. Imports torch when the first one comes."""
        os.setsid()
        os.chdir(ROOT)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        servers = []
        while ends := socket.recv_fds(requests, 1, 1)[1]:
            if kind is Kind.TORCH and not servers:
                import_torch()
            server = os.fork()
            if not server:
                requests.close()
                _serve(socket.socket(fileno=ends[0]))
                sys.exit()
            os.close(ends[0])
            servers.append(server)
        for server in servers:
            os.waitpid(server, 0)
        os._exit(0)


_zygotes: dict[Kind, Zygote] = {}


def start_zygotes() -> list[Zygote]:
    """Starts a zygote of each kind, which serve this process and those that are forked from it afterwards."""
    for kind in Kind:
        _zygotes[kind] = Zygote(kind, list(_zygotes.values()))
    return list(_zygotes.values())


def import_modules() -> None:
    """Imports MODULES, and leaves them to no collection of garbage."""
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def import_torch() -> None:
    """Imports what ranks, and runners that compute on the CPU, import besides, with the instruction set pinned."""
    pin()
    for name in (*forking.ALWAYS, *forking.OF_TEST_BACKENDS, *forking.OF_MODELS):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


_clients: dict[Kind, _Client] = {}
_clients_lock = threading.Lock()


def _client(kind: Kind) -> _Client:
    """Returns this process's client of a kind, created at first use."""
    with _clients_lock:
        if kind not in _clients:
            _clients[kind] = _Client(kind)
            atexit.register(_clients[kind].close)
        return _clients[kind]


def _of_the_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_OF_THE_START)}


class _Server:
    """The process that is forked: single-threaded, with none of Roster's modules imported."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> dict[str, str] | None:
        """Serves until the client closes the socket, then returns None. In each child: returns what it is to run."""
        while True:
            ready, _, _ = select.select([self._control, self._woken], [], [])
            if self._woken in ready:
                self._woken.recv(4096)
                self._bury()
            if self._control in ready:
                packet = self._control.recv(_PACKET)
                if not packet:
                    self._end_all()
                    return None
                asked = json.loads(packet)
                pid = os.fork()
                if not pid:
                    self._become(asked)
                    return asked
                self._children.add(pid)
                self._tell({"pid": pid})

    def _bury(self) -> None:
        """Reaps the children that have ended and reports their exit statuses."""
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._children.remove(pid)
            self._tell({"pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, int]) -> None:
        with contextlib.suppress(OSError):  # the client has gone; the next read of the socket finds that
            self._control.send(json.dumps(message).encode())

    def _end_all(self) -> None:
        """Kills each child and its process group; a new child may not lead a group yet."""
        for pid in self._children:
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    end(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)

    def _become(self, asked: dict) -> None:
        """In the child: releases the server's resources and takes on the requested environment."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        parent = os.getppid()
        for end in (self._control, self._woken, self._wake):
            end.close()
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the server ended before the death signal was set
        log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.chdir(asked["folder"])
        pinned = {name: os.environ[name] for name in PINNED if name in os.environ}
        os.environ.clear()
        if _DETERMINISTIC in asked["arguments"]:
            os.environ.update(pinned)
        os.environ.update(asked["environment"])
        if asked["fresh"]:
            os.execv(sys.executable, [sys.executable, "-m", asked["module"], *asked["arguments"]])
        if asked["module"] == "scheduler_svc.main":
            _fork_first_worker(asked)


def _fork_first_worker(asked: dict) -> None:
    """Forks the scheduler's first worker, for its first `spawn_worker`; in the worker, `asked` says so afterwards."""
    theirs, ours = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(theirs, 0)
        os.close(theirs)
        os.close(ours)
        asked |= {"module": "scheduler_svc.front.worker", "arguments": []}
        return
    os.close(theirs)
    worker_process = importlib.import_module("scheduler_svc.front.worker_process")
    spawn_worker, first = worker_process.spawn_worker, [ForkedWorker(pid, ours)]
    worker_process.spawn_worker = lambda: first.pop() if first else spawn_worker()


def _serve(control: socket.socket) -> None:
    """Serves until the other end is closed; in each child, runs what it is to run."""
    control.set_inheritable(False)
    asked = _Server(control).run()
    if asked is not None:
        sys.argv[1:] = asked["arguments"]
        sys.modules.pop(asked["module"], None)
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


def _main() -> None:
    import_modules()
    if Kind(sys.argv[2]) is Kind.TORCH:
        import_torch()
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _main()
