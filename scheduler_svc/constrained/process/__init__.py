"""Runs in mask processes: the only code that calls the grammar library."""
