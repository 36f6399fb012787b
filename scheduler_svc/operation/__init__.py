"""The service around the engine: processes, drain and shutdown, logs, messages for operators."""
