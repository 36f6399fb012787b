"""Finds policies by name and creates them with validated parameters.

A name is an entry point of the group `roster.policies`, a file or `module:Class` (see `policy_files`).
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from roster_common.wrong_values import wrong_values
from scheduler_svc.policy.interface import Policy
from scheduler_svc.policy.policy_files import (
    UnknownPolicy,
    checked_class,
    class_in_file,
    class_in_module,
    file_in,
    files_of,
    is_file_name,
)

ENTRY_POINT_GROUP = "roster.policies"
RETENTIONS = {"lru": ("scheduler_svc.policies.lru", "Lru"), "session": ("scheduler_svc.policies.session", "Session")}
"""The built-in policies that decide what the prefix cache keeps, by name. They decide nothing else."""


class WrongParameters(ValueError):
    """The policy does not accept these parameters; the message lists those it knows."""


def available_policies() -> list[str]:
    """Returns the names of the installed policies, sorted."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})


def policy_class(name: str, folder: Path | None = None) -> type[Policy]:
    """Returns the class of a policy: an installed one, `FILE.py` or `FILE.py:CLASS`, or `module:Class`.

    A file's name without a path is looked up in `folder` first. Raises UnknownPolicy.
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            return import_policy(entry)
    if is_file_name(name):
        in_folder = folder is not None and Path(name).name == name and name.partition(":")[0] in files_of(folder)
        return class_in_file(file_in(folder, name) if folder is not None and in_folder else name)
    if ":" in name:
        return class_in_module(name)
    raise UnknownPolicy(
        f"there is no policy {name!r}; installed are: {', '.join(available_policies())}. "
        "A policy of your own is a file, ./mine.py for example, or module:Class"
    )


def permitted_policy_class(name: str, folder: Path | None) -> type[Policy]:
    """Returns the class of a policy that a call may name: an installed one, or a file of `folder`.

    Raises UnknownPolicy.
    """
    if name in available_policies():
        return policy_class(name)
    if folder is not None and is_file_name(name):
        return class_in_file(file_in(folder, name))
    if folder is None and (is_file_name(name) or ":" in name):
        raise UnknownPolicy(
            f"{name!r} can't be set by a call: start the scheduler with --policy-dir FOLDER, and name a file of it"
        )
    files = files_of(folder) if folder is not None else []
    raise UnknownPolicy(
        f"there is no policy {name!r}; installed are: {', '.join(available_policies())}"
        + (f"; {folder} has {', '.join(files)}" if files else "")
    )


def load_retention(name: str, parameters: dict[str, Any], folder: Path | None = None) -> Policy:
    """Creates the policy that a setting names to decide what the prefix cache keeps: a built-in one, or any that
    overrides `retain`. Raises UnknownPolicy or WrongParameters."""
    return create_policy(_retaining(_retention(name) or policy_class(name, folder), name), parameters)


def permitted_retention(name: str, parameters: dict[str, Any], folder: Path | None) -> Policy:
    """Creates the policy that a call names to decide what the prefix cache keeps. Raises UnknownPolicy or
    WrongParameters."""
    return create_policy(_retaining(_retention(name) or permitted_policy_class(name, folder), name), parameters)


def _retention(name: str) -> type[Policy] | None:
    if name not in RETENTIONS:
        return None
    module, attribute = RETENTIONS[name]
    found: type[Policy] = getattr(import_module(module), attribute)
    return found


def _retaining(found: type[Policy], name: str) -> type[Policy]:
    """Returns `found`. Raises UnknownPolicy if it does not value prefixes."""
    if name not in RETENTIONS and found.retain is Policy.retain:
        raise UnknownPolicy(
            f"policy {name!r} does not decide what the prefix cache keeps: it does not override `retain`. "
            f"Built in are: {', '.join(RETENTIONS)}"
        )
    return found


def import_policy(entry: EntryPoint) -> type[Policy]:
    """Returns the class that the entry point names. Raises UnknownPolicy if it is not a policy or the import fails."""
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise UnknownPolicy(f"policy {entry.name!r} ({entry.value}) cannot be imported: {error!r}") from error
    return checked_class(found, f"policy {entry.name!r}: {entry.value}")


def load_policy(name: str, parameters: dict[str, Any], folder: Path | None = None) -> Policy:
    """Creates the policy that a setting names, as in `policy_class`.

    Raises UnknownPolicy, also if `folder` can't be read, or WrongParameters.
    """
    if folder is not None:
        files_of(folder)
    return create_policy(policy_class(name, folder), parameters)


def create_policy(found: type[Policy], parameters: dict[str, Any]) -> Policy:
    """Creates a policy. Raises WrongParameters."""
    try:
        return found(found.Parameters(**parameters))
    except ValidationError as error:
        known = ", ".join(found.Parameters.model_fields)
        raise WrongParameters(
            f"policy {found.name!r} does not accept these parameters: {wrong_values(error)}. It knows: {known}"
        ) from error
