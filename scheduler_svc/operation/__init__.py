"""The service around the engine: processes, drain and shutdown, logs, and what operators are told."""
