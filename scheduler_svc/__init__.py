"""Scheduler service: plans every step, serves gRPC, imports no torch."""
