"""The load: which requests, when, and how a system is asked."""
