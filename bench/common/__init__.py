"""What several benchmarks need: traces, models, timing, provenance."""
