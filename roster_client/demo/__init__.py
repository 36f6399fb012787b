"""`roster demo`: eight prompts under two policies, the answers and the roster as they come, and a table."""
