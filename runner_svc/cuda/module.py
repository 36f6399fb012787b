"""Compiles a CUDA source for the current GPU, with CuPy's NVRTC path and its disk cache.

Hopper gets `sm_90a` (wgmma, setmaxnreg), which CuPy does not choose by itself; other GPUs get their own architecture.
With ROSTER_CUDA_PORTABLE=1 the kernels are compiled as `compute_80` PTX instead, so that the code for older GPUs can be
tested on a newer one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from runner_svc.cuda.sources import headers_hash, kernel_folder

if TYPE_CHECKING:
    import cupy  # otherwise imported in functions: modules that only describe GPU work are imported without a GPU

DTYPE_DEFINES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
"""Values of a source's dtype macros."""


@dataclass(slots=True)
class Loads:
    """Modules that this process has loaded, and how long it waited for them."""

    count: int = 0
    seconds: float = 0.0


LOADS = Loads()


def is_portable() -> bool:
    """Returns whether kernels are compiled as `compute_80` PTX."""
    return os.environ.get("ROSTER_CUDA_PORTABLE", "0") not in ("", "0")


@cache
def is_hopper() -> bool:
    """Returns whether kernels are compiled for sm_90a, with `__CUDA_ARCH_FEAT_SM90_ALL` defined."""
    import cupy

    return not is_portable() and cupy.cuda.Device().compute_capability == "90"


@cache
def num_multiprocessors() -> int:
    """Returns the number of multiprocessors of the current GPU."""
    import cupy

    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])


def load(name: str, defines: Mapping[str, int | str]) -> cupy.RawModule:
    """Compiles `kernels/<name>.cu` with `defines` as macros and returns the module.

    With the macro CANONICAL the compiler contracts nothing: an addition after a product is rounded twice wherever the
    source does not ask for fmaf, so that all kernels that compute the same have the same bits.

    Raises cupy.cuda.compiler.CompileException, with the compiler's log, if it does not compile.
    """
    import cupy

    began_at = time.perf_counter()
    folder = kernel_folder()
    if is_portable():
        _compile_portable_ptx()
    _ask_compiler_once()
    options = (
        "-std=c++17",
        f"-I{folder}",
        # The key of CuPy's cache covers the source and the options, but not included headers.
        f"-DHEADERS_{headers_hash()}",
        *(("-arch=sm_90a",) if is_hopper() else ()),
        *(("--fmad=false",) if defines.get("CANONICAL") else ()),
        *(f"-D{key}={value}" for key, value in defines.items()),
    )
    module = cupy.RawModule(code=(folder / f"{name}.cu").read_text(encoding="utf-8"), options=options)
    module.compile()
    LOADS.count += 1
    LOADS.seconds += time.perf_counter() - began_at
    return module


@cache
def _compile_portable_ptx() -> None:
    """Makes CuPy emit `compute_80` PTX from now on; it has no public option for an older architecture."""
    import cupy

    compiler = cupy.cuda.compiler
    compiler._use_ptx = True
    compiler._get_arch = lambda: "80"


class _OneAnswer(dict[Any, str]):
    """The compiler's version by environment: the one that is known, for all."""

    def get(self, environment: Any, default: Any = None) -> Any:
        return next(iter(self.values()), default)


@cache
def _ask_compiler_once() -> None:
    """Makes CuPy compile an empty file for the compiler's version once, not for each set of options.

    That takes as long as loading a cached kernel ten times. The version does not depend on the options, which the key
    of the cache has anyway.
    """
    import cupy

    compiler = cupy.cuda.compiler
    if isinstance(getattr(compiler, "_empty_file_preprocess_cache", None), dict):
        compiler._empty_file_preprocess_cache = _OneAnswer()
