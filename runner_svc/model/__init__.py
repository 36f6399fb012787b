"""Models as the runner loads them: configuration, weights, tokenizer, and the description for the scheduler."""
