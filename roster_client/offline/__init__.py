"""Many requests at once: `LLM` for scripts and notebooks, and what it shares with `roster batch`."""
