"""The built-in policies, one a file; each is an entry point of group `roster.policies`."""
