"""The GPU backend: model loading, steps, CUDA graphs and buffers."""
