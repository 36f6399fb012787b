"""Matrix products of our own, and which variant of its kernel each gets."""
