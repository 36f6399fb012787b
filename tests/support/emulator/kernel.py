"""Replaces the CUDA driver: g++ compiles kernels, which run on the CPU, and tensor maps have the emulator's format."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import random
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from runner_svc.cuda.kernel import argument_pointers
from tests.support.emulator.translation import translated

_HEADER = Path(__file__).with_name("emulator.hpp")
_SHARED = Path(__file__).parents[3] / ".cache" / "emulator"
# Without -fno-gnu-unique, shared memory of inline functions would be one for all libraries, at the size of the first.
_OPTIONS = ["-std=c++17", "-Og", "-w", "-fno-strict-aliasing", "-fPIC", "-fno-gnu-unique"]
_KERNEL = re.compile(r'extern "C"[^;{(]*?(\w+)\s*\(')
_ENTRY = """
extern "C" int emulate_{name}(void** arguments, unsigned grid, unsigned threads, unsigned seed, char* fault) {{
    std::string said = emulator::launch({name}, arguments, grid, threads, seed);
    snprintf(fault, 2000, "%s", said.c_str());
    return said.empty() ? 0 : 1;
}}
"""


class EmulationError(RuntimeError):
    """Raised when a kernel did something that no kernel may do."""


class EmulatedModule:
    """`runner_svc.cuda.module.load` for the CPU: kernels/NAME.cu.

    `change` is applied to its preprocessed text. It is compiled at its first launch: a test that launches one of a
    model's kernels need not wait for the others.
    """

    def __init__(
        self,
        name: str,
        defines: Mapping[str, int | str],
        change: Callable[[str], str] = lambda text: text,
        arch: str = "sm_90a",
    ) -> None:
        self._name, self._defines, self._change, self._arch = name, defines, change, arch
        self.kernel = name
        """Name of the function that is launched."""

    @cached_property
    def library(self) -> ctypes.CDLL:
        """The compiled library, with a function `emulate_NAME` for each kernel."""
        text = self._change(translated(self._name, self._defines, self._arch))
        entries = [_ENTRY.format(name=name) for name in _KERNEL.findall(text)]
        return _library("\n".join((f'#include "{_HEADER}"', text, *entries)))


class EmulatedKernel:
    """`runner_svc.cuda.kernel.Kernel` on the CPU."""

    orders = random.Random()
    """Draws each launch's order of execution; seed it to repeat a run."""

    def __init__(
        self,
        module: EmulatedModule,
        name: str,
        arguments: str,
        block: int,
        *,
        shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        self._module, self._name, self._block = module, name, block
        self._struct = struct.Struct("@" + arguments)
        self._buffer = ctypes.create_string_buffer(self._struct.size)
        self._pointers = argument_pointers(self._buffer, arguments)

    def __call__(self, stream: int, grid: int, *arguments: Any) -> None:
        """Launches the kernel. Raises EmulationError."""
        self._struct.pack_into(self._buffer, 0, *arguments)
        fault = ctypes.create_string_buffer(2000)
        emulate = getattr(self._module.library, f"emulate_{self._name}")
        if emulate(self._pointers, grid, self._block, self.orders.randrange(2**31), fault):
            raise EmulationError(fault.value.decode())


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="emulated-")  # removed when the process ends


@cache
def _precompiled_header() -> Path:
    """Returns a precompiled header with what every kernel includes; parsing it would take a third of compilation.

    Processes share it: it is kept in the clone's .cache, for these options, headers and compiler.
    """
    compiler = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    sources = [path.read_bytes() for path in sorted(_HEADER.parent.glob("*.hpp"))]
    key = hashlib.sha256(b"\0".join([compiler, str(_HEADER).encode(), " ".join(_OPTIONS).encode(), *sources]))
    folder = _SHARED / key.hexdigest()[:16]
    header = folder / "precompiled.hpp"
    _SHARED.mkdir(parents=True, exist_ok=True)
    with open(_SHARED / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for old in _SHARED.glob("*/"):
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=_SHARED) as made:
                source = Path(made, "new", header.name)
                source.parent.mkdir()
                source.write_text(f'#include "{_HEADER}"\n', "utf-8")
                subprocess.run(["g++", *_OPTIONS, "-x", "c++-header", str(source), "-o", f"{source}.gch"], check=True)
                source.parent.rename(folder)
    return header


@cache
def _library(text: str) -> ctypes.CDLL:
    path = Path(_folder().name, hashlib.sha256(text.encode()).hexdigest()[:16])
    source, library = path.with_suffix(".cpp"), path.with_suffix(".so")
    source.write_text(text, "utf-8")
    header = ["-include", str(_precompiled_header())]
    subprocess.run(["g++", *_OPTIONS, *header, "-shared", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class MapEncoder:
    """The driver's cuTensorMapEncodeTiled, for maps that the emulator reads."""

    _FORMAT = struct.Struct("@q3q2qi3ii")

    def cuTensorMapEncodeTiled(  # the driver's name
        self, target, dtype, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill
    ) -> int:
        element_bytes = dtype + 1  # for types of 8 and 16 bits
        packed = self._FORMAT.pack(address.value, *sizes, *strides, element_bytes, *box, swizzle == 3)
        ctypes.memmove(target, packed, len(packed))
        return 0
