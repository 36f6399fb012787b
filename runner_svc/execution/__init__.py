"""Who executes plans: the runner, the plans in flight, and the executors for both kinds of backends."""
