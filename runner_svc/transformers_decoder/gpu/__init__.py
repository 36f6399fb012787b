"""Models of transformers on a GPU: their forward pass with parts swapped for Roster's kernels."""
