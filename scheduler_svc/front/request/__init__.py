"""From a public request to one that the engine takes: checked, tokenized, its tenant known."""
