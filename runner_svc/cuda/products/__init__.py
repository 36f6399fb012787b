"""Matrix products with kernels of this repository, and the selection of their variants."""
