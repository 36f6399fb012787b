"""Reports of runs: HTML pages, plots and files."""
