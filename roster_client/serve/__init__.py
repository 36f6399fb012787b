"""Runs both services as child processes of a command."""
