"""KV blocks of one runner: allocation, reference counts, and an index by content."""
