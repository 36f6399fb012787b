"""Runs a CUDA kernel's source on a CPU: every thread of a block is a fiber, PTX instructions are functions."""
