"""The gRPC service `vllm.grpc.engine.VllmEngine`, by which the gateway `smg` serves the OpenAI API over Roster."""
