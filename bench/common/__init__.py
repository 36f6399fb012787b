"""Code shared by benchmarks: traces, models, timing, provenance."""
