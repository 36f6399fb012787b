"""Speculation as the scheduler sees it: how many tokens each row drafts, and how many of them were accepted."""
