"""What a measured run consists of: facts about it, a record per request, samples of the service, the client's health.

All times are seconds since the run's start on the client's monotonic clock. Everything that drives a system fills these
classes, be it an endpoint over a network or a library in this process, and every report is made from them alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    """How a request ended."""

    OK = "ok"
    """Its stream came to its end (`output_tokens` may be below `wanted_tokens`: the model stopped)."""
    REFUSED = "refused"
    """Not accepted: queue full, rate limited, or not servable."""
    TIMEOUT = "timeout"
    """Given up by client or server when its time was over."""
    FAILED = "failed"
    """Anything else; `error` says what."""


class TokenCounts(Enum):
    """How the tokens of a message are known."""

    TOLD = "by the server, of every message"
    SPREAD = "by the server for a request, spread evenly over its messages"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, as its client saw it.

    A message of the stream may bring several tokens: `message_s[i]` is when message i came and `message_tokens[i]` how
    many tokens it brought. Messages without tokens (role, usage) are not listed.
    """

    request_id: str
    scheduled_s: float
    """When the request should have left, by trace or arrival process."""
    sent_s: float
    """When it left."""
    status: Status
    wanted_tokens: int
    """Output tokens that it asked for."""
    prompt_tokens: int = 0
    """By the server's count; of a request that failed, what was sent."""
    output_tokens: int = 0
    """By the server's count; of a request that failed, what came."""
    message_s: tuple[float, ...] = ()
    message_tokens: tuple[int, ...] = ()
    cached_tokens: int | None = None
    """Prompt tokens from a prefix cache; None where the server does not tell."""
    tenant: str = ""
    ttft_target_s: float | None = None
    """The request's own targets, which go before those of the report."""
    itl_target_s: float | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """It was served to its end."""
        return self.status is Status.OK

    @property
    def lag_s(self) -> float:
        """How late the client sent it."""
        return self.sent_s - self.scheduled_s

    @property
    def first_token_s(self) -> float:
        """Arrival of the first token. Raises IndexError when none came."""
        return self.message_s[0]

    @property
    def last_token_s(self) -> float:
        """Arrival of the last token. Raises IndexError when none came."""
        return self.message_s[-1]

    @property
    def ttft_s(self) -> float:
        """Time to first token, from the moment when the request should have left.

        From the scheduled time, because a client that is held up by a slow server would otherwise hide exactly those
        waits (coordinated omission).
        """
        return self.first_token_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """From the scheduled time to the last token."""
        return self.last_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (E2E - TTFT) / (output tokens - 1); None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between consecutive messages: the pauses that a reader sees."""
        return [later - earlier for earlier, later in zip(self.message_s, self.message_s[1:], strict=False)]

    @property
    def itls_s(self) -> list[float]:
        """Inter-token latencies, one per token of each message after the first.

        The pause before a message of k tokens counts as k latencies of a k-th of it: as if they had come evenly.
        """
        return [
            gap / count for gap, count in zip(self.gaps_s, self.message_tokens[1:], strict=True) for _ in range(count)
        ]


@dataclass(frozen=True, slots=True)
class ServiceSample:
    """The service at one moment: sequences in slots over slots is the batch fill."""

    time_s: float
    running: int
    slots: int
    waiting: int = 0
    used_blocks: int = 0
    blocks: int = 0
    preemptions: int = 0
    """Since the service started, as `plans`."""
    plans: int = 0


@dataclass(frozen=True, slots=True)
class LoopDelays:
    """How late the client's event loop woke from a sleep of `interval_s`, over the run, in seconds.

    An arrival is stamped when the loop gets to it: these delays are the error of all times of the run. `cpu_share` is
    the CPU time of the client's process over the run's time (1 = one core busy throughout).
    """

    interval_s: float
    count: int
    p50_s: float
    p99_s: float
    max_s: float
    cpu_share: float


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The facts about a run: what was measured, under which load, on what, and the command that repeats it."""

    system: str
    """Name in tables and legends: "fcfs", "static", "generate, padded", "vLLM"."""
    target: str
    """What was driven: "grpc://host:port", "http://host:port/v1", "transformers in this process"."""
    model: str
    workload: str
    """Name of the trace, or the distribution of lengths."""
    arrivals: str
    """In a sentence: "Poisson, 2.00/s", "as in the trace, 1.5 times as fast", "all at once"."""
    card: str
    """What computed: the GPU's name, or the processor and its cores. Runs on different cards are never compared."""
    command: str
    rate: float | None = None
    """Mean requests a second that were offered; None where all came at once."""
    seed: int = 0
    commit: str = ""
    date: str = ""
    """UTC, ISO 8601."""
    warmup_requests: int = 0
    """Sent before the run's start, and not recorded."""
    token_counts: str = TokenCounts.TOLD.value
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Of workload and system: divisors, jitter, slots, threads, policy, ..."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the numbers must know, in sentences."""


@dataclass(slots=True)
class Run:
    """A measured run; `requests` in order of their ends."""

    header: RunHeader
    requests: list[RequestRecord] = field(default_factory=list)
    samples: list[ServiceSample] = field(default_factory=list)
    loop_delays: LoopDelays | None = None
    """None where no event loop was the client (a library driven in this process)."""


class RecordFileError(ValueError):
    """A file that is no run; the message names the file, and the line where it has lines."""
