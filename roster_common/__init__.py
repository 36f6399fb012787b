"""Code shared by the services and the client. Importing it imports no torch, numpy, grpc or zmq."""
