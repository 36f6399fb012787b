"""`roster demo`: runs eight prompts under two policies, showing answers and roster live, and compares them."""
