"""Cost of the scheduler."""
