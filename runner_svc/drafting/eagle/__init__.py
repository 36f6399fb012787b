"""EAGLE: a draft layer on the model's own states, with KV of its own under the model's block ids."""
