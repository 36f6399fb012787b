"""Turns a plan's columns into a batch: checks the plan, changes the slots, selects the rows to compute."""
