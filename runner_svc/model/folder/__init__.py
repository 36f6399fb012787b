"""Reads the files of a model folder; refuses what is broken, and what a configuration says that nothing reads."""
