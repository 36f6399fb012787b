"""Pages, plots and files of runs."""
