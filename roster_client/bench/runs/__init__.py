"""Runs of `roster bench`: what is driven, how it is measured, and what is told about it."""
