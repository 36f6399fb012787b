"""Front workers: gRPC, validation, chat templates, (de)tokenizing, stop strings. No scheduling."""
