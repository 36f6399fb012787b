"""A model's weights as the decoders multiply with them."""
