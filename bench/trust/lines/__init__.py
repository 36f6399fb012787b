"""One promise a module: its `run(quick)` tries the promise and returns a `Line`."""
