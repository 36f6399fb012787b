"""Compiles a CUDA source for the current GPU, with CuPy's NVRTC path and its disk cache.

Hopper gets `sm_90a` (wgmma, setmaxnreg), which CuPy does not choose by itself; other GPUs get their own architecture.
With ROSTER_CUDA_PORTABLE=1 the kernels are compiled as `compute_80` PTX instead, so that the code for older GPUs can be
tested on a newer one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch

from runner_svc.cuda.sources import headers_hash, kernel_folder

if TYPE_CHECKING:
    import cupy  # otherwise imported in functions: modules that only describe GPU work are imported without a GPU

DTYPE_DEFINES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
"""Values of a source's dtype macros."""


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

    Raises cupy.cuda.compiler.CompileException, with the compiler's log, if it does not compile.
    """
    import cupy

    folder = kernel_folder()
    if is_portable():
        _compile_portable_ptx()
    options = (
        "-std=c++17",
        f"-I{folder}",
        # The key of CuPy's cache covers the source and the options, but not included headers.
        f"-DHEADERS_{headers_hash()}",
        *(("-arch=sm_90a",) if is_hopper() else ()),
        *(f"-D{key}={value}" for key, value in defines.items()),
    )
    module = cupy.RawModule(code=(folder / f"{name}.cu").read_text(encoding="utf-8"), options=options)
    module.compile()
    return module


@cache
def _compile_portable_ptx() -> None:
    """Makes CuPy emit `compute_80` PTX from now on; it has no public option for an older architecture."""
    import cupy

    compiler = cupy.cuda.compiler
    compiler._use_ptx = True
    compiler._get_arch = lambda: "80"
