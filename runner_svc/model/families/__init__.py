"""The families of models that the decoder computes: for each, a reader from a configuration to a description."""
