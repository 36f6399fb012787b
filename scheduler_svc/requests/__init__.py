"""Every request from Submit to its end: its sequences, its tenant's shares, what its worker is owed."""
