"""Our policies and transformers' continuous batching on one card in one run, within a budget of seconds."""
