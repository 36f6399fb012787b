"""Cost models: fitted to the steps of a live runner that were timed."""
