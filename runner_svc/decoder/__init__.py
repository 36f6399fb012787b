"""A model's forward pass: on the CPU, on a GPU, and on a GPU for small batches."""
