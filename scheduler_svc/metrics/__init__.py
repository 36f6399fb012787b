"""What Prometheus reads: measured by the engine as plain numbers, made text by the thread that answers a scrape."""
