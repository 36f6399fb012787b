"""One guarantee per module: its `run(quick)` tries the guarantee and returns a `Line`."""
