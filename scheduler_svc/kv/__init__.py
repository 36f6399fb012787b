"""KV blocks of one runner: who owns which, and their names by content."""
