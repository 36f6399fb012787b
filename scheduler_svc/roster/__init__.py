"""The parts of a runner's roster (`scheduler.Scheduler`): slots, plans, seats, shared prefixes, results applied."""
