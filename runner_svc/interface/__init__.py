"""The interfaces between a runner's parts: the data that they pass and the protocols of backends and kernels."""
