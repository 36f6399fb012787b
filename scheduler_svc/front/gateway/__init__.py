"""The gRPC service `vllm.grpc.engine.VllmEngine`, through which the gateway `smg` serves the OpenAI API."""
