"""Options that several commands of `roster` take."""
