"""Whose call it is: the value of the metadata key `roster-tenant`."""

from __future__ import annotations

import grpc

TENANT_KEY = "roster-tenant"


def tenant_of(context: grpc.aio.ServicerContext) -> str:
    """The tenant of a call, "" when it names none."""
    for key, value in context.invocation_metadata() or ():
        if key == TENANT_KEY:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return ""
