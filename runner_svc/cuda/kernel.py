"""A kernel that is launched at the cost of a C call.

A step without a graph has about two hundred launches. CuPy converts the arguments for each launch (about 9 µs). Here
they are packed into one buffer with a precomputed layout, and the driver is called through ctypes (about 2 µs). This
also supports programmatic dependent launch, which CuPy's launches do not: a kernel's start overlaps the end of its
predecessor, also inside CUDA graphs.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import cupy
    from torch import Tensor

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


def address_of(tensor: Tensor | None) -> int:
    """Returns the tensor's address as a kernel's argument; 0 without a tensor."""
    return tensor.data_ptr() if tensor is not None else 0


class LaunchError(RuntimeError):
    """The driver refused a launch."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Kernel:
    """A function of a module with its argument types, block size and dynamic shared memory.

    `arguments` is a `struct` format in the kernel's order: P pointer, i int32, q int64, f float, 128s a tensor map.
    With `overlap` the kernel is launched before its predecessor in the stream has ended. It must execute
    `griddepcontrol.wait` before it accesses memory that the predecessor writes. Not thread-safe.
    """

    def __init__(
        self,
        module: cupy.RawModule,
        name: str,
        arguments: str,
        block: int | tuple[int, int, int],
        *,
        shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        function = module.get_function(name)
        if shared_bytes > 48 * 1024:
            function.max_dynamic_shared_size_bytes = shared_bytes
        self.function = function  # also keeps the module loaded
        self._handle = ctypes.c_void_p(function.kernel.ptr)
        self._struct = struct.Struct("@" + arguments)
        self._buffer = ctypes.create_string_buffer(self._struct.size)
        self._pointers = argument_pointers(self._buffer, arguments)
        self._config = _Config()
        block_x, block_y, block_z = (block, 1, 1) if isinstance(block, int) else block
        self._config.block_x, self._config.block_y, self._config.block_z = block_x, block_y, block_z
        self._config.grid_y = self._config.grid_z = 1
        self._config.shared_bytes = shared_bytes
        if overlap:
            attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
            attribute.value[0] = 1
            self._config.attributes = ctypes.pointer(attribute)
            self._config.num_attributes = 1
        self._config_pointer = ctypes.byref(self._config)
        self._launch = driver().cuLaunchKernelEx

    def __call__(self, stream: int, grid: int | tuple[int, int, int], *arguments: Any) -> None:
        """Launches the kernel on `stream`, a handle (`torch.cuda.current_stream().cuda_stream`).

        Raises LaunchError if the driver refuses.
        """
        config = self._config
        if isinstance(grid, int):
            config.grid_x = grid
        else:
            config.grid_x, config.grid_y, config.grid_z = grid
        config.stream = stream
        self._struct.pack_into(self._buffer, 0, *arguments)
        status = self._launch(self._config_pointer, self._handle, self._pointers, None)
        if status:
            raise LaunchError(f"launching {self.function.name} on a grid of {grid} failed: {error_name(status)}")


def argument_pointers(buffer: ctypes.Array[ctypes.c_char], arguments: str) -> ctypes.Array[ctypes.c_void_p]:
    """Returns the address of each argument inside `buffer`."""
    codes = [f"128{code}" if code == "s" else code for code in arguments.replace("128s", "s")]
    base = ctypes.addressof(buffer)
    ends = [struct.calcsize("@" + "".join(codes[: index + 1])) for index in range(len(codes))]
    starts = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
    return (ctypes.c_void_p * len(codes))(*[base + start for start in starts])


@cache
def driver() -> ctypes.CDLL:
    """Returns the driver's library."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return library


def error_name(status: int) -> str:
    """Returns the name of a status of the driver."""
    name = ctypes.c_char_p()
    driver().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {status}"
