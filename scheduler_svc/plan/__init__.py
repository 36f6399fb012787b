"""Plans of one runner: slots and their counters, a plan's draft and rows, results applied to them."""
