"""Launchers of the CUDA kernels in `kernels/`, except those of attention, and what they need of the driver."""
