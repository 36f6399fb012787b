"""The host tier of a runner's KV cache: loads, offloads, and the plans and results that start and confirm them."""
