"""Runs a CUDA kernel's source on a CPU: every thread of a block a fiber, PTX instructions as functions."""
