"""Times of one request's events. The spans are written once, when the request has ended.

| span    | from                             | to                               |
|---------|----------------------------------|----------------------------------|
| request | its arrival at this worker       | its last token, or its failure   |
| prepare | its arrival at this worker       | its submission to the engine     |
| queue   | its submission                   | its first slot                   |
| prefill | its first slot                   | its first token                  |
| decode  | its first token                  | its last token                   |

With several choices, a time is that of the first choice, and the end is that of the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from roster_protos import engine_pb2
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.request.validation import ValidRequest

Metadata = Iterable[tuple[str, str | bytes]]
"""Metadata of a gRPC call."""


@dataclass(slots=True)
class RequestTrace:
    """Trace of one request. Times are in nanoseconds since 1970. `write` is called once with the trace."""

    write: Callable[[RequestTrace], None]
    parent: object
    """The caller's OpenTelemetry context."""
    begin_ns: int = field(default_factory=time.time_ns)
    submitted_ns: int | None = None
    first_token_ns: int | None = None
    end_ns: int = 0
    queue_s: float | None = None
    """Seconds until the first choice got a slot; None if none did."""
    model: str = ""
    tenant: str = ""
    request: ValidRequest | None = None
    """None if the request was refused before it was validated."""
    ends: list[engine_pb2.End] = field(default_factory=list)
    """Ends of the choices that have ended."""
    num_tokens: int = 0
    """Number of tokens generated and kept, over all choices."""
    refusal: Refusal | None = None
    cut: bool = False
    """Whether the client disconnected before the end."""
    written: bool = False

    def submitted(self, request: ValidRequest, tenant: str, model: str) -> None:
        """Records the submission to the engine."""
        self.submitted_ns = time.time_ns()
        self.request, self.tenant, self.model = request, tenant, model

    def token(self) -> None:
        """Records the first token; later calls have no effect."""
        if self.first_token_ns is None:
            self.first_token_ns = time.time_ns()

    def choice_ended(self, end: engine_pb2.End, num_tokens: int) -> None:
        """Records the end of a choice, of which `num_tokens` tokens are kept."""
        self.ends.append(end)
        self.num_tokens += num_tokens
        if end.HasField("queue_s") and (self.queue_s is None or end.queue_s < self.queue_s):
            self.queue_s = end.queue_s

    def refused(self, refusal: Refusal) -> None:
        """Ends the trace of a request that was refused or failed as a whole."""
        self.refusal = refusal
        self.finish()

    def disconnected(self) -> None:
        """Ends the trace when the client has disconnected, without waiting for the request's end."""
        self.cut = True
        self.finish()

    def finish(self) -> None:
        """Ends and writes the trace. Later calls have no effect."""
        if not self.written:
            self.written = True
            self.end_ns = time.time_ns()
            self.write(self)
