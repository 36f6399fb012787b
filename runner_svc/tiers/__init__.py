"""The host tier of the KV cache: copies of blocks between a cache and a host pool."""
