"""Cost of the front workers."""
