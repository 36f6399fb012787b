"""The GPU backend as one rank of several, and what the ranks agree on."""
