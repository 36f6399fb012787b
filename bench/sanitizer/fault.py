"""Kernel that is wrong on purpose; `bench.sanitizer` runs it to check that the tool reports faults.

compute-sanitizer --tool memcheck python -m bench.sanitizer.fault memcheck
"""

from __future__ import annotations

import sys

SOURCE = r"""
extern "C" __global__ void wrong_on_purpose(int* out, int offset) {
    __shared__ int shared[64];
    shared[threadIdx.x] = threadIdx.x;
    // no barrier: another warp may not have written yet
    out[threadIdx.x + offset] = shared[63 - threadIdx.x];
}
"""


def main() -> None:
    import cupy

    kernel = cupy.RawModule(code=SOURCE).get_function("wrong_on_purpose")
    out = cupy.cuda.runtime.malloc(
        64 * 4
    )  # a separate allocation, not from CuPy's pool, so that the tool knows its end
    kernel((1,), (64,), (cupy.uint64(out), cupy.int32(64 if sys.argv[1] == "memcheck" else 0)))
    cupy.cuda.runtime.deviceSynchronize()


if __name__ == "__main__":
    main()
