"""Checks the invariants of all requests of an engine; used by tests after every step."""

from __future__ import annotations

from scheduler_svc.model.sequence import Phase, Request, Sequence
from scheduler_svc.queue.tenant_shares import TenantShares
from scheduler_svc.requests.request_book import RequestBook


def check_book(book: RequestBook, shares: TenantShares) -> None:
    """Raises RuntimeError with the first violated invariant. O(live sequences)."""
    requests = book.live()
    shares.check([s for request in requests for s in request.sequences if s.phase is not Phase.FINISHED])
    for request in requests:
        _check_prompt_logprobs(request)
        if request.sampling.HasField("logprobs"):
            for sequence in request.sequences:
                _check_logprobs(sequence)


def _check_logprobs(sequence: Sequence) -> None:
    """Checks that each sampled token has its log-probability."""
    known = sum(len(row.values) // 4 for row in sequence.logprobs)
    sampled = sequence.num_generated - sequence.request.num_received
    if known != sampled:
        raise RuntimeError(f"sequence {sequence.id}: {known} log-probabilities for {sampled} tokens")


def _check_prompt_logprobs(request: Request) -> None:
    """Checks that they are complete before the first token is sampled."""
    logprobs, sampled = request.prompt_logprobs, any(s.num_generated > request.num_received for s in request.sequences)
    if logprobs is not None and sampled and logprobs.next_position != request.prompt_len:
        known = logprobs.next_position - 1
        raise RuntimeError(f"request {request.request_id!r}: {known} log-probabilities for {request.prompt_len} tokens")
