"""Built-in policies by name, without reading the installed entry points each time: that takes 40 ms."""

from __future__ import annotations

from functools import cache

from scheduler_svc.policy import Policy, load_policy


@cache
def _class_named(name: str) -> type[Policy]:
    return type(load_policy(name, {}))


def policy_named(name: str) -> Policy:
    """Returns a new policy of this name with its default parameters."""
    found = _class_named(name)
    return found(found.Parameters())
