"""What came of simulations: numbers, tables and pictures."""
