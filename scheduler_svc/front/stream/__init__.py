"""A front worker's connection to the engine, and the streams of its requests and their choices."""
