"""Memory of the host that processes share by descriptor, in place of a GPU's."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor


class MemoryFile:
    """Implements `runner_svc.interface.device.SharedTensor` and `runner_svc.transfer.memory_reader.Mapping`."""

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        """`descriptor`: that of another process's memory, which is mapped; None makes new memory."""
        self.size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if descriptor is None:
            self._descriptor = os.memfd_create("roster-test")
            os.ftruncate(self._descriptor, self.size)
        else:
            self._descriptor = os.dup(descriptor)
        self._map = mmap.mmap(self._descriptor, self.size)
        self.tensor: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.is_closed = False

    @classmethod
    def imported(cls, descriptor: int, size: int) -> MemoryFile:
        return cls(size, descriptor)

    def descriptor(self) -> int:
        return os.dup(self._descriptor)

    def close(self) -> None:
        self.is_closed = True
        os.close(self._descriptor)
