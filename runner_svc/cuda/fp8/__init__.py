"""Products with matrices of FP8 on a GPU."""
