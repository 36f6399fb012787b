"""The runner service: executes numbered plans and returns sampled tokens; decides nothing."""
