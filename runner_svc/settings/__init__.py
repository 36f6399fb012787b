"""What an operator, or a test, may set on a runner."""
