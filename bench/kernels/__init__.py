"""Times every kernel on the local GPU: `python -m bench.kernels`."""
