"""Refusals that do not depend on a request's data: no model yet, draining, attached elsewhere, engine lost."""

from __future__ import annotations

from grpc import StatusCode

from scheduler_svc.front.base.refusal import Refusal, invalid

_RETRY_SOON_MS = 1000
"""Time to retry where nothing says how long the cause will last."""


def engine_lost() -> Refusal:
    """The engine process has exited, and this worker is about to."""
    return Refusal(StatusCode.UNAVAILABLE, "the scheduler has shut down; send the request again or attach to it later")


def draining() -> Refusal:
    """The service is about to stop."""
    message = "the server is shutting down and takes no new requests; send the request to another server"
    return Refusal(StatusCode.UNAVAILABLE, message, retry_after_ms=_RETRY_SOON_MS)


def no_model() -> Refusal:
    """No runner has sent Hello, so neither a tokenizer nor a context length is known."""
    message = "no model is being served yet: a runner is still loading, or none was started; try again"
    return Refusal(StatusCode.UNAVAILABLE, message, retry_after_ms=_RETRY_SOON_MS)


def model_unusable(reason: str) -> Refusal:
    """The runner's tokenizer can't be used."""
    return Refusal(StatusCode.FAILED_PRECONDITION, f"the runner's model cannot be served: {reason}")


def too_many_big() -> Refusal:
    """The big requests that are being prepared reach this process's limit of bytes."""
    message = "too many big requests are being prepared; try again"
    return Refusal(StatusCode.RESOURCE_EXHAUSTED, message, retry_after_ms=_RETRY_SOON_MS)


def attached_elsewhere(request_id: str) -> Refusal:
    """Another call has attached to the request."""
    message = f"another call has attached to request {request_id!r} and receives its output now"
    return Refusal(StatusCode.ABORTED, message)


def cursor_past_end(index: int, cursor: int, num_tokens: int) -> Refusal:
    """An attach cursor lies beyond the generated tokens."""
    message = f"the cursor is {cursor}, but choice {index} has only {num_tokens} tokens so far"
    return invalid(f"received[{index}]", f"{message}; send the number of tokens that arrived")
