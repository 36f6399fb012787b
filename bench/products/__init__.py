"""Matrix products on a GPU."""
