"""The built-in policies, one per file; each is an entry point of the group `roster.policies`."""
