"""Medusa: heads on the model's own states, each of which drafts the token at its distance."""
