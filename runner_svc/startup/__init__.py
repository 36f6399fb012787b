"""The runner's start-up: choice of the device, the backend, loading progress, and the runner's name."""
