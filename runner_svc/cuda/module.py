"""Compiles a CUDA source for the GPU at hand, with CuPy's NVRTC path and its disk cache.

Hopper gets `sm_90a` (wgmma, setmaxnreg), which CuPy does not choose by itself; other GPUs get their own architecture.
With ROSTER_CUDA_PORTABLE=1 the kernels are compiled as `compute_80` PTX instead, so that the code for older GPUs can be
run, and tested, on a newer one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch

from runner_svc.cuda.sources import headers_hash, kernel_folder

if TYPE_CHECKING:
    import cupy  # elsewhere where it is used: what only describes work on a GPU is imported without one

DTYPE_DEFINES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
"""What a source's dtype macro is defined as."""


def is_portable() -> bool:
    """Kernels are compiled as `compute_80` PTX."""
    return os.environ.get("ROSTER_CUDA_PORTABLE", "0") not in ("", "0")


@cache
def is_hopper() -> bool:
    """Kernels are compiled for sm_90a: `__CUDA_ARCH_FEAT_SM90_ALL` is defined in them."""
    import cupy

    return not is_portable() and cupy.cuda.Device().compute_capability == "90"


@cache
def num_multiprocessors() -> int:
    """Multiprocessors of the current GPU."""
    import cupy

    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])


def load(name: str, defines: Mapping[str, int | str]) -> cupy.RawModule:
    """The module of `kernels/<name>.cu`, with each of `defines` as a macro.

    Raises cupy.cuda.compiler.CompileException, with the compiler's log, when it does not compile.
    """
    import cupy

    folder = kernel_folder()
    if is_portable():
        _compile_portable_ptx()
    options = (
        "-std=c++17",
        f"-I{folder}",
        # CuPy's cache looks at the source and the options, not at what the source includes.
        f"-DHEADERS_{headers_hash()}",
        *(("-arch=sm_90a",) if is_hopper() else ()),
        *(f"-D{key}={value}" for key, value in defines.items()),
    )
    module = cupy.RawModule(code=(folder / f"{name}.cu").read_text(encoding="utf-8"), options=options)
    module.compile()
    return module


@cache
def _compile_portable_ptx() -> None:
    """Has CuPy emit `compute_80` PTX from now on; it offers no public way to name an older architecture."""
    import cupy

    compiler = cupy.cuda.compiler
    compiler._use_ptx = True
    compiler._get_arch = lambda: "80"
