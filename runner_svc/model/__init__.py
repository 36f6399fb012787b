"""Language models for the runner: configuration, weights, one decoder for all, and what the scheduler is told of it."""
