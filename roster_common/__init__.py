"""What the services and the client share: no torch, numpy, grpc or zmq comes with its import."""
