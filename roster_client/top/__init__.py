"""`roster top`: a live view of a service, with keys that change the policy."""
