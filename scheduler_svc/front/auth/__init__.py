"""Listen addresses, TLS and token authentication of the gRPC servers."""
