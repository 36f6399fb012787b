"""Raw CUDA kernels (`kernels/`) and their launchers: everything of a GPU step but the matrix products and attention."""
