"""A model's weights: which tensors a checkpoint must have, and how they are read and merged."""
