"""The backend of a GPU: its steps, their graphs and buffers, and how a model gets there."""
