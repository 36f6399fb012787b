"""Start-up of a runner: its phases with empty and with warm caches, and reading weights by itself."""
