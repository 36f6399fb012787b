"""GPU memory that processes of one host share: allocations whose handles are file descriptors, passed over a socket.

The driver's virtual memory management, by ctypes on libcuda: an import takes under a millisecond, where
`cudaIpcOpenMemHandle` takes 144. Imported memory stays valid as long as it is mapped, also after its owner has been
killed, and is not freed before: a process that imports it has to unmap what belonged to a process that has ended.
"""

from __future__ import annotations

import ctypes
import os
import socket
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch import Tensor

_PINNED, _POSIX_DESCRIPTOR, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3


class SharedMemoryError(RuntimeError):
    """The driver refused; the message has its error."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class SharedMemory:
    """Mapped device memory: `address` and `size` in bytes, a multiple of the driver's granularity."""

    def __init__(self, handle: int, size: int, device: int) -> None:
        """Maps an allocation, which belongs to this object from then on. Raises SharedMemoryError."""
        self._handle, self.size, self._device = ctypes.c_uint64(handle), size, device
        address = ctypes.c_uint64()
        try:
            _call("cuMemAddressReserve", ctypes.byref(address), _size(size), _size(0), ctypes.c_uint64(0), _flags())
            self.address = int(address.value)
            try:
                _call("cuMemMap", address, _size(size), _size(0), self._handle, _flags())
                access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
                _call("cuMemSetAccess", address, _size(size), ctypes.byref(access), _size(1))
            except SharedMemoryError:
                _driver().cuMemUnmap(address, _size(size))
                _driver().cuMemAddressFree(address, _size(size))
                raise
        except SharedMemoryError:
            _driver().cuMemRelease(self._handle)
            raise

    @classmethod
    def create(cls, num_bytes: int, device: int = 0) -> Self:
        """Allocates at least `num_bytes` on the device. Raises SharedMemoryError."""
        properties = _Properties(_PINNED, _POSIX_DESCRIPTOR, _Location(_ON_DEVICE, device), None, _AllocationFlags())
        granularity = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), ctypes.c_int(1))
        size = -(-num_bytes // granularity.value) * granularity.value
        handle = ctypes.c_uint64()
        _call("cuMemCreate", ctypes.byref(handle), _size(size), ctypes.byref(properties), _flags())
        return cls(handle.value, size, device)

    @classmethod
    def imported(cls, descriptor: int, size: int, device: int = 0) -> Self:
        """Maps another process's allocation of `size` bytes; the descriptor may be closed after. Raises
        SharedMemoryError."""
        handle = ctypes.c_uint64()
        of_system = ctypes.c_void_p(descriptor)
        _call("cuMemImportFromShareableHandle", ctypes.byref(handle), of_system, ctypes.c_int(_POSIX_DESCRIPTOR))
        return cls(handle.value, size, device)

    def descriptor(self) -> int:
        """Returns a new file descriptor of the allocation, which the caller closes. Raises SharedMemoryError."""
        found = ctypes.c_int()
        kind = ctypes.c_int(_POSIX_DESCRIPTOR)
        _call("cuMemExportToShareableHandle", ctypes.byref(found), self._handle, kind, _flags())
        return found.value

    def close(self) -> None:
        """Unmaps the memory, and frees it if no other process has it mapped. Nothing may use it any more."""
        if self.address:
            address, self.address = ctypes.c_uint64(self.address), 0
            _call("cuMemUnmap", address, _size(self.size))
            _call("cuMemAddressFree", address, _size(self.size))
            _call("cuMemRelease", self._handle)

    @property
    def tensor(self) -> Tensor:
        """The memory as a torch tensor, uint8 [size], which keeps this object."""
        import torch

        return torch.as_tensor(self, device=f"cuda:{self._device}")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as uint8 [size], which torch and CuPy take without a copy."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3, "strides": None}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def send_descriptor(connection: socket.socket, data: bytes, descriptor: int) -> None:
    """Sends `data`, at least a byte, and the descriptor over a unix socket, and closes the descriptor."""
    try:
        socket.send_fds(connection, [data], [descriptor])
    finally:
        os.close(descriptor)


def receive_descriptor(connection: socket.socket, most_bytes: int) -> tuple[bytes, int]:
    """Returns what `send_descriptor` sent; the caller closes the descriptor. -1: there was none."""
    data, descriptors, _, _ = socket.recv_fds(connection, most_bytes, 1)
    for extra in descriptors[1:]:
        os.close(extra)
    return data, descriptors[0] if descriptors else -1


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _error_name(status: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {status}"


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


@cache
def _flags() -> ctypes.c_uint64:
    return ctypes.c_uint64(0)


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise SharedMemoryError(f"{name} failed: {_error_name(status)}")
