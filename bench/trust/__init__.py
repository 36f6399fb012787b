"""Trials of Roster's isolation guarantees, each with a bar: `python -m bench.trust`."""
