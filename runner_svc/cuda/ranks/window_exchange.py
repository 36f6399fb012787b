"""Shares a window of GPU memory with all other ranks of this host: descriptors over unix sockets.

Only processes of the same user get one, from a socket whose random name the ranks tell one another through their group.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from runner_svc.cuda.memory.shared_memory import SharedMemoryError, receive_descriptor, send_descriptor
from runner_svc.interface.device import SharedTensor
from runner_svc.interface.ranks import Communicator, RankLost

_NAME_BYTES = 32
_SIZE = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")
_TIMEOUT_S = 10.0


class Window(Protocol):
    """Mapped memory of a rank; implemented by `runner_svc.cuda.memory.shared_memory.SharedMemory`."""

    address: int

    def close(self) -> None:
        """Unmaps it."""


def exchange_windows(
    ranks: Communicator, own: SharedTensor, import_memory: Callable[[int, int], Window]
) -> dict[int, Window]:
    """Returns the other ranks' windows, mapped, by rank. All ranks call this at the same time.

    `import_memory` maps the memory of a descriptor, of a number of bytes. Raises RankLost if a rank does not answer,
    and SharedMemoryError, after which no window is mapped.
    """
    shard = ranks.shard
    name = secrets.token_bytes(_NAME_BYTES // 2).hex()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(_address(name))
        server.listen(shard.size)
        server.settimeout(_TIMEOUT_S)
        gathered = ranks.all_gather(torch.tensor([list(name.encode())], dtype=torch.uint8))
        names = [bytes(each).decode() for each in gathered.view(shard.size, _NAME_BYTES).tolist()]
        serving = threading.Thread(target=_serve, args=(server, own, shard.size - 1), name="window", daemon=True)
        serving.start()
        windows: dict[int, Window] = {}
        try:
            for rank, other in enumerate(names):
                if rank != shard.rank:
                    windows[rank] = _mapped(other, rank, import_memory)
        except BaseException:
            close_all(list(windows.values()))
            raise
        finally:
            serving.join()
    return windows


def close_all(windows: Sequence[Window]) -> None:
    """Unmaps windows that no launch uses any more."""
    for window in windows:
        window.close()


def _serve(server: socket.socket, own: SharedTensor, count: int) -> None:
    """Hands the descriptor to `count` processes of this user, unless one of them does not come in time."""
    served = 0
    while served < count:
        try:
            connection, _ = server.accept()
        except OSError:  # a rank is late, or lost: its own attempts say so
            return
        with connection:
            if _user_of(connection) == os.getuid():
                send_descriptor(connection, _SIZE.pack(own.size), own.descriptor())
                served += 1


def _mapped(name: str, rank: int, import_memory: Callable[[int, int], Window]) -> Window:
    descriptor = -1
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(_address(name))
            frame, descriptor = receive_descriptor(connection, _SIZE.size)
        if descriptor < 0 or len(frame) != _SIZE.size:
            raise RankLost(f"rank {rank} shared no memory")
        return import_memory(descriptor, *_SIZE.unpack(frame))
    except OSError as error:
        raise RankLost(f"rank {rank} shared no memory: {error}") from error
    except SharedMemoryError as error:
        raise SharedMemoryError(
            f"the GPU of rank {rank} can't be reached from this one's ({error}): set all_reduce to 'nccl'"
        ) from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user


def _address(name: str) -> str:
    return f"\0roster-window-{name}"
