"""Short names of requests in pictures: short ids as they are, and numbers in place of long ones, such as random ids."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 8
"""Characters of an id that is shown as it is."""


def labels_of(requests: Sequence[str]) -> dict[str, str]:
    """Returns a label for each request, in order of `requests`: "#7" for the id "7" or, if an id is long, for the
    seventh request.

    A choice, "id/1", has the label of its request and the choice's index.
    """
    known = set(requests)
    ids = {request: _split(request, known) for request in requests}
    names = list(dict.fromkeys(base for base, _ in ids.values()))
    if any(len(name) > LONGEST for name in names):
        short = {name: f"#{number}" for number, name in enumerate(names, 1)}
    else:
        short = {name: f"#{name}" if name.isdecimal() else name for name in names}
    return {request: short[base] + choice for request, (base, choice) in ids.items()}


def _split(request: str, known: set[str]) -> tuple[str, str]:
    """Returns the id and the suffix of a choice of a request whose first choice is known, otherwise "" for it."""
    base, slash, index = request.rpartition("/")
    return (base, slash + index) if base in known and index.isdecimal() else (request, "")
