"""What one tenant may have in the service at once, as an operator sets it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TenantLimits(BaseModel):
    """None: no limit but the queue's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    waiting: int | None = Field(None, ge=1, description="Sequences that may wait.")
    tokens: int | None = Field(None, ge=1, description="Prompt tokens that may wait.")
    running: int | None = Field(None, ge=1, description="Sequences that may be in slots; others wait.")
    weight: float = Field(1.0, gt=0, description="Its part of a full queue, relative to that of other tenants.")
