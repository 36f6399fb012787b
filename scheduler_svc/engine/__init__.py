"""The engine: puts the parts together and steps; commands of front workers, results of runners."""
