"""Finds policies by name among the entry points of group `roster.policies`, and builds them with checked parameters."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from scheduler_svc.policy.interface import Policy

ENTRY_POINT_GROUP = "roster.policies"


class UnknownPolicy(ValueError):
    """No such policy, or parameters that it does not take; the message lists what exists."""


def available_policies() -> list[str]:
    """Names of the installed policies, sorted."""
    return sorted(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))


def policy_class(name: str) -> type[Policy]:
    """The class of the policy of this name. Raises UnknownPolicy with a list of what exists."""
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            found: type[Policy] = entry.load()
            return found
    raise UnknownPolicy(f"there is no policy {name!r}; installed are: {', '.join(available_policies())}")


def load_policy(name: str, parameters: dict[str, Any]) -> Policy:
    """Builds the policy of this name. Raises UnknownPolicy with a list of what exists."""
    found = policy_class(name)
    try:
        return found(found.Parameters(**parameters))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        known = ", ".join(found.Parameters.model_fields)
        raise UnknownPolicy(f"policy {name!r} does not take these parameters: {problems}. It knows: {known}") from error
