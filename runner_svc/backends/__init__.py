"""Backends that compute while the caller waits: torch on the CPU, and two for tests that need no model."""
