"""Finds policies by name among the entry points of group `roster.policies`, and builds them with checked parameters."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from roster_common.wrong_values import wrong_values
from scheduler_svc.policy.interface import Policy

ENTRY_POINT_GROUP = "roster.policies"


class UnknownPolicy(ValueError):
    """No such policy, or its package can't be imported; the message lists what exists."""


class WrongParameters(ValueError):
    """Parameters that the policy does not take; the message lists those that it knows."""


def available_policies() -> list[str]:
    """Names of the installed policies, sorted."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})


def policy_class(name: str) -> type[Policy]:
    """The class of the policy of this name. Raises UnknownPolicy."""
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            return import_policy(entry)
    raise UnknownPolicy(f"there is no policy {name!r}; installed are: {', '.join(available_policies())}")


def import_policy(entry: EntryPoint) -> type[Policy]:
    """The class that the entry point names. Raises UnknownPolicy when there is none or it can't be imported."""
    try:
        found = entry.load()
    except Exception as error:  # a third party's code
        raise UnknownPolicy(f"policy {entry.name!r} ({entry.value}) can't be imported: {error!r}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise UnknownPolicy(f"policy {entry.name!r}: {entry.value} is not a class that extends Policy")
    return found


def load_policy(name: str, parameters: dict[str, Any]) -> Policy:
    """Builds the policy of this name. Raises UnknownPolicy or WrongParameters, with a list of what exists."""
    found = policy_class(name)
    try:
        return found(found.Parameters(**parameters))
    except ValidationError as error:
        known = ", ".join(found.Parameters.model_fields)
        raise WrongParameters(
            f"policy {name!r} does not take these parameters: {wrong_values(error)}. It knows: {known}"
        ) from error
