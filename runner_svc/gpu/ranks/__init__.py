"""Where the ranks of a group compute, what they exchange over, and what is refused."""
