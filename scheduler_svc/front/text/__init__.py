"""A model's text: tokenizer, chat templates, detokenization, stop strings."""
