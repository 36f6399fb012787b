"""The runner's end of the link to the scheduler."""
