"""Finds policies by name in the entry-point group `roster.policies`, and creates them with validated parameters."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from roster_common.wrong_values import wrong_values
from scheduler_svc.policy.interface import Policy

ENTRY_POINT_GROUP = "roster.policies"
_DEFAULT = EntryPoint("auto", "scheduler_svc.policies.auto:Auto", ENTRY_POINT_GROUP)
"""The default policy, which is found even in a checkout whose package was installed before the policy existed."""


class UnknownPolicy(ValueError):
    """The policy is not installed or cannot be imported; the message says which, and what is installed."""


class WrongParameters(ValueError):
    """The policy does not accept these parameters; the message lists those it knows."""


def installed_policies() -> list[EntryPoint]:
    """Returns the entry points of the installed policies, sorted by name."""
    found = list(entry_points(group=ENTRY_POINT_GROUP))
    if not any(entry.name == _DEFAULT.name for entry in found):
        found.append(_DEFAULT)
    return sorted(found, key=lambda entry: entry.name)


def available_policies() -> list[str]:
    """Returns the names of the installed policies, sorted."""
    return sorted({entry.name for entry in installed_policies()})


def policy_class(name: str) -> type[Policy]:
    """Returns the class of the policy of this name. Raises UnknownPolicy."""
    for entry in installed_policies():
        if entry.name == name:
            return import_policy(entry)
    raise UnknownPolicy(f"there is no policy {name!r}; installed are: {', '.join(available_policies())}")


def import_policy(entry: EntryPoint) -> type[Policy]:
    """Returns the class that the entry point names. Raises UnknownPolicy if it is not a policy or the import fails."""
    try:
        found = entry.load()
    except Exception as error:  # third-party code may raise anything
        raise UnknownPolicy(f"policy {entry.name!r} ({entry.value}) cannot be imported: {error!r}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise UnknownPolicy(f"policy {entry.name!r}: {entry.value} is not a class that extends Policy")
    return found


def load_policy(name: str, parameters: dict[str, Any]) -> Policy:
    """Creates the policy of this name. Raises UnknownPolicy or WrongParameters."""
    found = policy_class(name)
    try:
        return found(found.Parameters(**parameters))
    except ValidationError as error:
        known = ", ".join(found.Parameters.model_fields)
        raise WrongParameters(
            f"policy {name!r} does not accept these parameters: {wrong_values(error)}. It knows: {known}"
        ) from error
