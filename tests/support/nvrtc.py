"""Compiles the product's kernels with NVRTC alone: no GPU, no driver, no CuPy.

Needs the wheels nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-cccl (in the `dev` extra). As a program: `python
-m tests.support.nvrtc kernels/silu_mul.cu sm_90a -DSCALAR=__nv_bfloat16` prints each kernel's registers, shared memory
and spills.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from functools import cache
from pathlib import Path

from runner_svc.cuda.sources import kernel_folder


@cache
def toolkit_folder() -> Path | None:
    """Returns the folder `nvidia/cu13` of the wheels, or None if they are not installed."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(root) / "cu13"
        if (folder / "lib" / "libnvrtc.so.13").exists():
            return folder
    return None


@cache
def _library() -> ctypes.CDLL:
    folder = toolkit_folder()
    if folder is None:
        raise FileNotFoundError(
            "install nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-cccl to compile kernels"
        )
    for builtins in sorted((folder / "lib").glob("libnvrtc-builtins.so.13*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "lib" / "libnvrtc.so.13"))


def compile_kernel(path: Path, arch: str, defines: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Returns the machine code (PTX for a `compute_` arch) of one .cu file, and the compiler's log.

    Raises RuntimeError with the log if it does not compile.
    """
    library, folder = _library(), toolkit_folder()
    program = ctypes.c_void_p()
    source = path.read_bytes()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source, path.name.encode(), 0, None, None))
    options = [
        f"-arch={arch}",
        "-std=c++17",
        f"-I{kernel_folder()}",
        f"-I{folder}/include",
        f"-I{folder}/include/cccl",
        # As CuPy adds them.
        "--device-as-default-execution-space",
        "-ftz=true",
        "-Xptxas=-v",
        *defines,
    ]
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = library.nvrtcCompileProgram(program, len(options), array)
    log = _fetch(program, "nvrtcGetProgramLog").rstrip(b"\0").decode()
    if status != 0:
        raise RuntimeError(f"{path.name} for {arch}, {' '.join(defines)}:\n{log}")
    code = _fetch(program, "nvrtcGetPTX" if arch.startswith("compute_") else "nvrtcGetCUBIN")
    _check(library.nvrtcDestroyProgram(ctypes.byref(program)))
    return code, log


def _fetch(program: ctypes.c_void_p, getter: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"{getter}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), getter)(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"NVRTC failed with status {status}")


def main() -> None:
    path, arch, *defines = sys.argv[1:]
    code, log = compile_kernel(Path(path), arch, tuple(defines))
    print(log, f"{len(code)} bytes", sep="\n")


if __name__ == "__main__":
    main()
