"""Reports of an engine: status, steps, the running batch for operators, and snapshots for metrics."""
