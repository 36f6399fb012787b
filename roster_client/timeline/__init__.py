"""The roster over time: recordings of steps, and what is made of them: a picture, a trace for Perfetto, a table."""
