"""Products with matrices of 4-bit numbers."""
