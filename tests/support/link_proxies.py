"""Proxies between the scheduler and a runner: a TCP proxy that can be cut, and one that tampers with frames."""

from __future__ import annotations

import random
import selectors
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import zmq


class TcpProxy:
    """Forwards connections to a port of this machine until it is cut. Runs in a thread."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._open = True
        self._forwarding = True
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tcp-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        """Address to which a runner connects."""
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Resets every connection, new ones included, until `heal`."""
        with self._lock:
            self._open = False
            self._reset()

    def heal(self) -> None:
        """Accepts connections again, and forwards the data held back."""
        with self._lock:
            self._open = self._forwarding = True

    def freeze(self) -> None:
        """Keeps connections open but forwards nothing until `heal`, as a broken switch does."""
        with self._lock:
            self._forwarding = False

    def retarget(self, port: int) -> None:
        """Resets all connections; new ones go to another port."""
        with self._lock:
            self._target_port = port
            self._reset()

    def _reset(self) -> None:
        for end in list(self._pairs):
            self._close(end)

    def _close(self, end: socket.socket) -> None:
        if end in self._pairs:
            other = self._pairs.pop(end)
            del self._pairs[other]
            for one in (end, other):
                self._selector.unregister(one)
                one.close()

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(0.02):
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif self._forwarding and key.fileobj in self._pairs:
                        self._forward(key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            if not self._open:
                raise OSError("cut")
            far = socket.create_connection(("127.0.0.1", self._target_port), timeout=1)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        self._pairs[near], self._pairs[far] = far, near
        for end in (near, far):
            self._selector.register(end, selectors.EVENT_READ, None)

    def _forward(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            if data:
                self._pairs[end].sendall(data)
                return
        except OSError:
            pass
        self._close(end)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._thread.join()
        self._reset()
        self._listener.close()
        self._selector.close()


Meddler = Callable[[random.Random, bytes, list[bytes]], list[bytes]]
"""(rng, frame, frames held back) -> frames to forward now."""


def lose(rng: random.Random, frame: bytes, held: list[bytes]) -> list[bytes]:
    """Loses one frame in twenty."""
    return [] if rng.random() < 0.05 else [frame]


def double(rng: random.Random, frame: bytes, held: list[bytes]) -> list[bytes]:
    """Duplicates one frame in five."""
    return [frame, frame] if rng.random() < 0.2 else [frame]


def reorder(rng: random.Random, frame: bytes, held: list[bytes]) -> list[bytes]:
    """Delays one frame in ten behind the next."""
    if rng.random() < 0.1 and not held:
        held.append(frame)
        return []
    late, held[:] = list(held), []
    return [frame, *late]


def truncate(rng: random.Random, frame: bytes, held: list[bytes]) -> list[bytes]:
    """Truncates one frame in twenty."""
    return [frame[: rng.randrange(len(frame))]] if rng.random() < 0.05 and frame else [frame]


class FrameProxy:
    """Forwards each runner's messages through `meddle` in both directions. Runs in a thread."""

    def __init__(self, target: str, meddle: Meddler, seed: int) -> None:
        self._target = target
        self._meddle = meddle
        self._rng = random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._near = self._context.socket(zmq.ROUTER)
        self._near.setsockopt(zmq.LINGER, 0)
        port = self._near.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.meddled = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="frame-proxy", daemon=True)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._near, zmq.POLLIN)
        far: dict[bytes, zmq.Socket[bytes]] = {}
        held: dict[tuple[bytes, bool], list[bytes]] = {}
        while not self._stopping:
            ready = dict(poller.poll(20))
            if self._near in ready:
                identity, frame = self._near.recv_multipart()
                if identity not in far:
                    far[identity] = self._connect(identity)
                    poller.register(far[identity], zmq.POLLIN)
                for passed in self._pass(frame, held.setdefault((identity, True), [])):
                    far[identity].send(passed)
            for identity, socket_ in far.items():
                if socket_ in ready:
                    for passed in self._pass(socket_.recv(), held.setdefault((identity, False), [])):
                        self._near.send_multipart((identity, passed))
        for socket_ in (self._near, *far.values()):
            socket_.close(linger=0)

    def _connect(self, identity: bytes) -> zmq.Socket[bytes]:
        socket_ = self._context.socket(zmq.DEALER)
        socket_.setsockopt(zmq.IDENTITY, identity)
        socket_.setsockopt(zmq.LINGER, 0)
        socket_.connect(self._target)
        return socket_

    def _pass(self, frame: bytes, held: list[bytes]) -> list[bytes]:
        passed = self._meddle(self._rng, frame, held)
        self.meddled += passed != [frame]
        return passed

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._thread.join()
        self._context.destroy(linger=0)
