"""Names that no setting has: `ROSTER_*` variables and keys of the settings file.

| name | treatment |
| --- | --- |
| a setting of either service, or a variable of the client | known; a service ignores the other's |
| within two edits of a known one | refused with it: it is a misspelling |
| what Kubernetes makes of a Service called `roster`; variables of this repository's deployment and tests | ignored |
| another variable | one warning |
| another key of the file | refused |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from roster_common.setting_names import SETTINGS

PREFIX = "ROSTER_"
UNKNOWN = "these variables are not settings and are ignored: correct their names, or unset them"
EDITS = 2
"""Insertions, deletions and replacements that make a name a misspelling."""

CLIENT = frozenset(
    {"SETTINGS", "SERVER", "ADMIN", "TLS", "TLS_CA", "CERT", "KEY", "TOKEN", "TENANT"},
)
"""Variables of the client, and the one that names the settings file, without the prefix."""

_REPOSITORY = re.compile(
    "ADDRESS|BIND|COLUMNS|COMMIT|COMPOSE|CUDA_PORTABLE|GGUF_ORACLE|GO_PATH|SECRETS|((ADMIN|GATEWAY)_)?PORT"
    r"|(GATEWAY|GPU_RUNNER|RUNNER|SCHEDULER)_(CPUS|MEMORY)|(CHAOS|FUZZ|SOAK|TEST)_\w+"
)
_KUBERNETES = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")


def misspelled(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is nearest to a name within `EDITS` edits, or None."""
    near = [(edits(name, each), each) for each in known if abs(len(name) - len(each)) <= EDITS]
    distance, nearest = min(near, default=(EDITS + 1, ""))
    return nearest if distance <= EDITS else None


def edits(first: str, second: str) -> int:
    """Returns the Levenshtein distance of two names."""
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        left, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            left, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, left + (letter != other))
    return row[-1]


def refused_variable(environment: Mapping[str, str], own: Iterable[str] = ()) -> str | None:
    """Returns a sentence about the first variable that is a misspelling, or None. `own`: the caller's settings."""
    known = {name.upper() for name in own}
    for variable, name in _unknown(environment):
        if name in known:
            continue
        if meant := misspelled(name, sorted(SETTINGS_AND_CLIENT)):
            return f"{variable} is not a setting: did you mean {PREFIX}{meant}? Correct its name, or unset it"
    return None


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns the variables that nothing reads, for a warning."""
    return [variable for variable, _ in _unknown(environment)]


def refused_key(keys: Iterable[str], own: Iterable[str] = ()) -> str | None:
    """Returns a clause about the first key of the settings file that neither service knows, or None.

    `own`: the caller's settings, and names that it refuses itself.
    """
    own = set(own)
    for key in keys:
        if key in SETTINGS or key in own:
            continue
        meant = misspelled(key.lower().replace("-", "_"), sorted(SETTINGS))
        remedy = f"did you mean {meant!r}?" if meant else "remove it (docs/settings.md lists the settings)"
        return f"has the key {key!r}, which is not a setting: {remedy}"
    return None


SETTINGS_AND_CLIENT = CLIENT | {name.upper() for name in SETTINGS}


def _unknown(environment: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Yields each unknown variable, and its name in capitals without the prefix."""
    for variable in environment:
        name = variable.upper()
        if not name.startswith(PREFIX):
            continue
        name = name.removeprefix(PREFIX)
        if name and name not in SETTINGS_AND_CLIENT and not _is_ignored(name):
            yield variable, name


def _is_ignored(name: str) -> bool:
    if _KUBERNETES.fullmatch(name):
        return True
    return _REPOSITORY.fullmatch(name) is not None and misspelled(name, ["TEST_BACKEND"]) is None
