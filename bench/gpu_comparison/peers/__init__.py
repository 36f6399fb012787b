"""Comparison with another server on one card (`bench.gpu_comparison --peer`), in parts that a later call resumes.

The files above this folder are another comparison, of policies and of transformers.
"""
