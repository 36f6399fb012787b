"""Names of the profiles, a setting of both services."""

from __future__ import annotations

from typing import Literal

ProfileName = Literal["latency", "balanced", "throughput", "quiet"]
