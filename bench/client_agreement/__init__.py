"""Comparison of `roster bench` with an independent client and with the times on the wire."""
