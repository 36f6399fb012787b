"""KV blocks outside steps: copies between a cache and a host pool, and blocks as bytes."""
