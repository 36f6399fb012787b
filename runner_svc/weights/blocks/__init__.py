"""Formats of weights with a scale for each short group of columns: GGUF's blocks, int8, and MXFP4."""
