"""The gRPC services of a front worker, and the pacing of their messages."""
