"""A GPU's KV blocks as bytes, for moves between runners."""
