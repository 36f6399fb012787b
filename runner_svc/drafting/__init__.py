"""Drafters of backends on the CPU, and the rule that accepts drafted tokens."""
