"""Requests from Submit to their end: sequences, tenant shares, messages to front workers."""
