"""The gRPC services of a front worker, and how they write to their clients."""
