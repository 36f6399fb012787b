"""Policies and other ways to batch, served on one machine."""
