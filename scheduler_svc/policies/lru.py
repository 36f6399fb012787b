"""Keeps the least recently used prefixes last, whatever they are worth: the default retention."""

from __future__ import annotations

from scheduler_svc.policy import Policy, PolicyParameters


class LruParameters(PolicyParameters):
    """None of its own."""


class Lru(Policy):
    """Retention: the least recently used block is evicted first."""

    name = "lru"
    Parameters = LruParameters
