"""Times every kernel on the GPU at hand: `python -m bench.kernels`."""
