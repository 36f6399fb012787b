"""A GPU backend that is one rank of several: what the ranks agree on, and what is refused."""
