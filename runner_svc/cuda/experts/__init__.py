"""Kernels of mixtures of experts and what launches them."""
