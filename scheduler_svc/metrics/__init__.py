"""Prometheus metrics: the engine measures plain numbers, the thread that answers a scrape formats them."""
