"""Limits of one tenant, set by an operator."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TenantLimits(BaseModel):
    """Limits of one tenant; None means that only the queue's own limit applies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    waiting: int | None = Field(None, ge=1, description="Maximum number of waiting sequences.")
    tokens: int | None = Field(None, ge=1, description="Maximum number of waiting prompt tokens.")
    running: int | None = Field(None, ge=1, description="Maximum number of running sequences; further ones wait.")
    weight: float = Field(1.0, gt=0, description="Share of a full queue, relative to other tenants.")
