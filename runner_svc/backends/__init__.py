"""Backends that compute while the caller waits: torch on the CPU, and two without a model for tests."""
