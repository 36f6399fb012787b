"""From settings to a backend that is ready, and a runner's name."""
