"""Launchers of the CUDA kernels in `kernels/`, except those of attention; compilation, streams, graphs and memory."""
