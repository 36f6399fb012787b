"""Streams of a front worker: its line to the engine, each request and each of its choices."""
