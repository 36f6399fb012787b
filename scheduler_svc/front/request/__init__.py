"""Turns a public request into one for the engine: authentication of its tenant, validation, tokenization."""
