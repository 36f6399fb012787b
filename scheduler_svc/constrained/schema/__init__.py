"""Refuses JSON schemas whose numbers the grammar library changes or crashes on."""
