"""Serving benchmark on a GPU under the real scheduler: `python -m bench.gpu_serving`."""
