"""The commands of `roster`, a file a command or a few that belong together."""
