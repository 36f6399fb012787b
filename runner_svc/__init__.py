"""The runner service: executes the scheduler's numbered plans and returns sampled tokens; makes no decisions."""
