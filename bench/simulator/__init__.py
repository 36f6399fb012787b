"""The simulator against what it simulates."""
