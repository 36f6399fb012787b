"""What a step on the CPU computes with: torch's own functions, or those whose bits depend on a row alone."""
