"""Reads tensors of safetensors files to a GPU: a few threads read pieces into page-locked buffers, which are copied.

Copying from a memory map would read a page at a time and through the driver's own buffer, in one thread. The copies are
on the caller's stream, which orders them with what computes on the tensor. Besides the tensor itself only the buffers
take memory.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from runner_svc.model.checkpoint.runs import Runs
from runner_svc.model.folder.errors import BrokenModel
from runner_svc.model.folder.json_file import AGAIN
from runner_svc.model.folder.safetensors_header import StoredTensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""By safetensors' names."""

_THREADS = 8
_BUFFERS = 2
"""Of each thread: one is filled while the other is copied."""
_PIECE_BYTES = 4 << 20


@dataclass(slots=True)
class _Buffer:
    """Page-locked memory, and the end of its last copy."""

    content: Tensor
    copied: torch.cuda.Event | None = None


@dataclass(slots=True)
class _Buffers:
    """Those of one thread, used in turns."""

    all: list[_Buffer] = field(default_factory=list)
    uses: int = 0


class StagedReader:
    """Reads tensors by name, each as stored. Use it as a context manager; one thread calls it.

    The device may also be a CPU, where it only serves tests.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        device: torch.device,
        read: Callable[..., Tensor],
        *,
        threads: int | None = None,
        piece_bytes: int = _PIECE_BYTES,
    ) -> None:
        """`read` reads a tensor or slices of it to the CPU.

        It reads those of types that are not in `DTYPES`, and names that `tensors` lacks.
        """
        self._tensors = tensors
        self._device = device
        self._read = read
        self._piece_bytes = piece_bytes
        self._files: dict[Path, int] = {}
        self._own = threading.local()
        self._closing = ExitStack()
        self._threads = ThreadPoolExecutor(threads or min(_THREADS, os.cpu_count() or 1), "weights")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        if self._device.type == "cuda" and error is None:
            torch.cuda.current_stream(self._device).synchronize()
        self._closing.close()
        self._files.clear()

    def __call__(self, name: str, *places: slice) -> Tensor:
        """Returns the tensor, or slices of its first dimensions, on the device, complete once the current stream is.

        Raises BrokenModel if the file has become shorter, and OSError with its name if it can't be read.
        """
        stored = self._tensors.get(name)
        if stored is None or stored.dtype not in DTYPES:
            return self._read(name, *places).to(self._device)
        dtype = DTYPES[stored.dtype]
        if math.prod(stored.shape) * dtype.itemsize != stored.num_bytes:  # which the safetensors library refuses
            return self._read(name, *places).to(self._device)
        runs = Runs.of(stored.shape, places)
        tensor = torch.empty(runs.shape, dtype=dtype, device=self._device)
        content = tensor.view(-1).view(torch.uint8)
        file = self._open(stored.path)
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        pieces = [
            self._threads.submit(self._copy, stored, file, content, begin, stream, runs)
            for begin in range(0, len(content), self._piece_bytes)
        ]
        for piece in pieces:
            piece.result()
        return tensor

    def _copy(
        self,
        stored: StoredTensor,
        file: int,
        content: Tensor,
        begin: int,
        stream: torch.cuda.Stream | None,
        runs: Runs,
    ) -> None:
        """Reads a piece of a tensor and launches its copy."""
        part = content[begin : begin + self._piece_bytes]
        buffer = self._next_buffer()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        staged = buffer.content[: len(part)]
        for first, last, place in runs.places(begin, begin + len(part), DTYPES[stored.dtype].itemsize):
            _fill(staged[first - begin : last - begin], file, stored.begin + place, stored.path)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            part.copy_(staged, non_blocking=True)
            if stream is not None:
                buffer.copied = buffer.copied or torch.cuda.Event()
                buffer.copied.record(stream)

    def _next_buffer(self) -> _Buffer:
        own = getattr(self._own, "buffers", None)
        if own is None:
            pinned = self._device.type == "cuda"
            empty = [torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(_BUFFERS)]
            own = self._own.buffers = _Buffers([_Buffer(content) for content in empty])
        own.uses += 1
        return own.all[own.uses % _BUFFERS]

    def _open(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._closing.callback(os.close, self._files[path])
        return self._files[path]


def _fill(staged: Tensor, file: int, place: int, path: Path) -> None:
    """Fills the bytes from the file's `place` on."""
    view, done = staged.numpy().data, 0
    while done < len(view):
        try:
            count = os.preadv(file, [view[done:]], place + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        if not count:
            raise BrokenModel(f"{path} became shorter while it was read: {AGAIN}.")
        done += count
