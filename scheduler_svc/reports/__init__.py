"""What an engine tells of itself: status, steps, the batch as operators watch it, snapshots for metrics."""
