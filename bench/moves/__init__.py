"""What it costs to move sequences between runners."""
