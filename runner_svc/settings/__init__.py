"""Settings of the runner, for operators and for tests."""
