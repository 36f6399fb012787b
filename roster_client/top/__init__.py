"""`roster top`: what a service does now, drawn again and again, with keys that change the policy."""
