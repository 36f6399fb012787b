"""Reports of simulations: numbers, tables and plots."""
