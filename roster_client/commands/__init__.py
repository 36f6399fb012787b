"""The `roster` commands, one per file or a few related ones."""
