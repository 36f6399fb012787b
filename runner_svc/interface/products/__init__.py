"""Interfaces of the products with matrices on a GPU."""
