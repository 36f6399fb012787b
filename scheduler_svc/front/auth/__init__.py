"""Who may connect: addresses, TLS, certificates and tokens."""
