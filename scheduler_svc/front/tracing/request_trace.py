"""When things happened to one request, noted as they happen; the spans are written once, when it has ended.

| span    | from                             | to                               |
|---------|----------------------------------|----------------------------------|
| request | its arrival at this worker       | its last token, or its failure   |
| prepare | the same                         | its submission to the engine     |
| queue   | its submission                   | its first slot                   |
| prefill | its first slot                   | its first token                  |
| decode  | its first token                  | its last token                   |

With several choices, a span begins with the first of them and ends with the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from roster_protos import engine_pb2
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.request.validation import ValidRequest

Metadata = Iterable[tuple[str, str | bytes]]
"""Of a gRPC call."""


@dataclass(slots=True)
class RequestTrace:
    """Times in nanoseconds since 1970. `write` gets the trace, once."""

    write: Callable[[RequestTrace], None]
    parent: object
    """The caller's context, as OpenTelemetry has it."""
    begin_ns: int = field(default_factory=time.time_ns)
    submitted_ns: int | None = None
    first_token_ns: int | None = None
    end_ns: int = 0
    queue_s: float | None = None
    """Seconds until the first choice had a slot; None if none had."""
    model: str = ""
    tenant: str = ""
    request: ValidRequest | None = None
    """None if it was refused before it was understood."""
    ends: list[engine_pb2.End] = field(default_factory=list)
    """Of the choices that have ended."""
    num_tokens: int = 0
    """Generated and kept, by all choices."""
    refusal: Refusal | None = None
    cut: bool = False
    """Its client went before the end."""
    written: bool = False

    def submitted(self, request: ValidRequest, tenant: str, model: str) -> None:
        """It goes to the engine."""
        self.submitted_ns = time.time_ns()
        self.request, self.tenant, self.model = request, tenant, model

    def token(self) -> None:
        """A token came."""
        if self.first_token_ns is None:
            self.first_token_ns = time.time_ns()

    def choice_ended(self, end: engine_pb2.End, num_tokens: int) -> None:
        """The engine's last word on a choice, of whose tokens `num_tokens` are kept."""
        self.ends.append(end)
        self.num_tokens += num_tokens
        if end.HasField("queue_s") and (self.queue_s is None or end.queue_s < self.queue_s):
            self.queue_s = end.queue_s

    def refused(self, refusal: Refusal) -> None:
        """It fails as a whole."""
        self.refusal = refusal
        self.finish()

    def disconnected(self) -> None:
        """Its client is gone, and with it the reason to wait for its end."""
        self.cut = True
        self.finish()

    def finish(self) -> None:
        """All has been said. Harmless when repeated."""
        if not self.written:
            self.written = True
            self.end_ns = time.time_ns()
            self.write(self)
