"""How evenly something is shared, in one number."""

from __future__ import annotations

from collections.abc import Sequence


def jain_index(shares: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2) (Jain, Chiu, Hawe 1984): 1 all alike, 1/n one has all; 1 when nobody has anything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
