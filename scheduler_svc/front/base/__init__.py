"""Basics of a front worker's modules: refusals with their details, packed columns, ranges of values."""
