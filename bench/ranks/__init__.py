"""How fast plans reach the ranks of a group."""
