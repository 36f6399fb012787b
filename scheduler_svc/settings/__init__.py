"""Settings of the scheduler service, and the check of what they expose to the network."""
