"""Times measured while a runner starts on a GPU, kept for later starts on the same kind of card."""
