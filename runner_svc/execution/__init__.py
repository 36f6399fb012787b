"""Execution of plans: the runner, the plans in flight, and an executor for each kind of backend."""
