"""`roster doctor`: checks what the services need on this machine, and says what to do."""
