"""Launchers of the kernels that draft tokens on the device, and accept them."""
