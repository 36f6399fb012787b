"""Refuses JSON schemas with numbers that the grammar library changes or that crash it."""
