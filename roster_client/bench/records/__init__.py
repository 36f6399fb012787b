"""Records of runs, their files and their summaries."""
