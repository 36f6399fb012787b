"""Calibration: cost models fitted to the timed steps of a live runner."""
