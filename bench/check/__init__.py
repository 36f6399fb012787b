"""Regression gate: compares valgrind's instruction counts of fixed pieces of work with stored counts."""
