"""What an operator sets: read, checked, and what it opens to the network."""
