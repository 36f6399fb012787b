"""GPU memory that several processes of a host map."""
