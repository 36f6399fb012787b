"""The typed client of Roster and the `roster` command."""
