"""What a runner's parts know of one another: data that they pass, and protocols of those that compute."""
