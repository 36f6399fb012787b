"""Plans of one runner: slot counters, drafts and rows, plans in flight, and applied results."""
