"""From logits to tokens: what is drawn, adjusted and reported, on the CPU and for the device."""
