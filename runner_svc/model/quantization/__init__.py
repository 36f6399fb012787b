"""How a checkpoint's matrices are quantized: what config.json says of it, and the tensors that follow from that."""
