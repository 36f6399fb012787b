"""Refusals that have nothing to do with a request's own data: no model yet, draining, handed over, engine lost."""

from __future__ import annotations

from grpc import StatusCode

from scheduler_svc.front.base.refusal import Refusal, invalid

_RETRY_SOON_MS = 1000


def engine_lost() -> Refusal:
    """The engine process is gone, and this worker with it."""
    return Refusal(StatusCode.UNAVAILABLE, "the scheduler has shut down; send the request again or attach to it later")


def draining() -> Refusal:
    """The service is about to stop."""
    message = "the server is shutting down and takes nothing new; send the request to another one"
    return Refusal(StatusCode.UNAVAILABLE, message, retry_after_ms=_RETRY_SOON_MS)


def no_model() -> Refusal:
    """No runner has said hello, so there is neither a tokenizer nor a context length."""
    message = "no model is being served yet: a runner is still loading or none was started; try again"
    return Refusal(StatusCode.UNAVAILABLE, message, retry_after_ms=_RETRY_SOON_MS)


def model_unusable(reason: str) -> Refusal:
    """The runner's tokenizer or template could not be used."""
    return Refusal(StatusCode.FAILED_PRECONDITION, f"the runner's model can not be served: {reason}")


def too_many_big() -> Refusal:
    """More bytes are being tokenized than this process may hold."""
    message = "too many big requests are being prepared; try again"
    return Refusal(StatusCode.RESOURCE_EXHAUSTED, message, retry_after_ms=_RETRY_SOON_MS)


def attached_elsewhere(request_id: str) -> Refusal:
    """Another call took the stream over."""
    message = f"request {request_id!r} is now followed by another call that attached to it"
    return Refusal(StatusCode.ABORTED, message)


def cursor_past_end(index: int, cursor: int, num_tokens: int) -> Refusal:
    """An attach cursor beyond what was generated."""
    message = f"{cursor} tokens can't have been received of choice {index}, which has {num_tokens} so far"
    return invalid(f"received[{index}]", f"{message}; give the number of tokens that arrived")
