"""Launchers of the CUDA kernels in `kernels/`, except those of attention, and the services of the GPU that they use."""
