"""A model folder's tokenizer: every fact of its files is used, known to be harmless, or refused by name."""
