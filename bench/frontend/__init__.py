"""Cost of the front."""
