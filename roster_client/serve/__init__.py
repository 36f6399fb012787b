"""Both services as child processes of a command."""
