"""What all of a front worker's parts use: refusals with their details, packed columns, ranges of values."""
