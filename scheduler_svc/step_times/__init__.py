"""A runner's step times, for everything in the core that plans with them."""
