"""The scheduler service: decides every step, speaks gRPC, imports no torch."""
