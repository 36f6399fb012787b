"""From a plan's columns to a batch: the check, the slots that it changes, the rows that it computes."""
