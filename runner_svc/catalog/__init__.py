"""The models on this machine, and which of them can be served."""
