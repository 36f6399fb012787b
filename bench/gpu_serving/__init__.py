"""Serving on the GPU at hand under the real scheduler: `python -m bench.gpu_serving` (see `__main__`)."""
