"""What is kept of runs, and what they come to."""
