"""Ends a call with a refusal: status, sentence, and google.rpc details in the trailing metadata."""

from __future__ import annotations

from typing import NoReturn

import grpc

from scheduler_svc.front.base.refusal import Refusal


async def abort(context: grpc.aio.ServicerContext, refusal: Refusal) -> NoReturn:
    """Never returns: gRPC's abort raises."""
    await context.abort(refusal.code, refusal.message, refusal.trailing_metadata())
    raise RuntimeError("abort returned")
