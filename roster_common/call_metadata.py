"""Metadata keys of gRPC calls, which the client sends and the scheduler reads."""

from __future__ import annotations

TENANT_KEY = "roster-tenant"
TOKEN_KEY = "authorization"
