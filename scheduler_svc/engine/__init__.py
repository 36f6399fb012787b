"""The engine: assembles the parts, runs the step loop, handles commands of front workers and results of runners."""
