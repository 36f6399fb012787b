"""Runs of `roster bench`: options, the system under load, measurement and provenance."""
