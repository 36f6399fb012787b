"""What a step on the CPU computes with: torch's own functions, or the canonical ones, whose bits depend on a row alone."""
