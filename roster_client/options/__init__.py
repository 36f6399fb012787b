"""Options that several `roster` commands share."""
