"""Sampling: logit adjustments, token draws and log-probabilities, on the CPU and for the device."""
