"""The data of a measured run: its header, a record per request, samples of the service, the client's delays.

All times are seconds since the run's start on the client's monotonic clock. Every kind of run fills these classes,
whether over a network or of a library in this process, and every report is made from them alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    """Outcome of a request."""

    OK = "ok"
    """Its stream completed (`output_tokens` may be below `wanted_tokens`: the model stopped)."""
    REFUSED = "refused"
    """Not accepted: queue full, rate limited, or invalid."""
    TIMEOUT = "timeout"
    """Abandoned by client or server at its deadline."""
    FAILED = "failed"
    """Any other failure; `error` describes it."""


class TokenCounts(Enum):
    """Source of the number of tokens of a message."""

    TOLD = "by the server, of every message"
    SPREAD = "by the server for a request, spread evenly over its messages"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, as observed by its client.

    A message of the stream may have several tokens: `message_s[i]` is the arrival time of message i, and
    `message_tokens[i]` its number of tokens. Messages without tokens (role, usage) are not listed.
    """

    request_id: str
    scheduled_s: float
    """Time at which the request was due, by trace or arrival process."""
    sent_s: float
    """Time at which it was sent."""
    status: Status
    wanted_tokens: int
    """Number of output tokens requested."""
    prompt_tokens: int = 0
    """The server's count; for a failed request, the number sent."""
    output_tokens: int = 0
    """The server's count; for a failed request, the number received."""
    message_s: tuple[float, ...] = ()
    message_tokens: tuple[int, ...] = ()
    cached_tokens: int | None = None
    """Prompt tokens from a prefix cache; None if the server does not report them."""
    tenant: str = ""
    ttft_target_s: float | None = None
    """The request's own targets override those of the report."""
    itl_target_s: float | None = None
    error: str = ""
    drafted_tokens: int | None = None
    """Tokens that were drafted and verified; None if the server does not report them."""
    accepted_tokens: int | None = None
    """Those of them that were accepted."""

    @property
    def ok(self) -> bool:
        """Whether the request was completed."""
        return self.status is Status.OK

    @property
    def lag_s(self) -> float:
        """Delay of sending, in seconds."""
        return self.sent_s - self.scheduled_s

    @property
    def first_token_s(self) -> float:
        """Arrival of the first token. Raises IndexError if there is none."""
        return self.message_s[0]

    @property
    def last_token_s(self) -> float:
        """Arrival of the last token. Raises IndexError if there is none."""
        return self.message_s[-1]

    @property
    def ttft_s(self) -> float:
        """Time to first token, from the scheduled time of the request.

        If it counted from the time of sending, a client that is blocked by a slow server would hide exactly those
        waits (coordinated omission).
        """
        return self.first_token_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """Time from the scheduled time to the last token."""
        return self.last_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (E2E - TTFT) / (output tokens - 1); None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive messages: the pauses that a user sees."""
        return [later - earlier for earlier, later in zip(self.message_s, self.message_s[1:], strict=False)]

    @property
    def itls_s(self) -> list[float]:
        """Inter-token latencies, one per token of each message after the first.

        The pause before a message of k tokens counts as k latencies of a k-th of it, as if they had arrived evenly.
        """
        return [
            gap / count for gap, count in zip(self.gaps_s, self.message_tokens[1:], strict=True) for _ in range(count)
        ]


@dataclass(frozen=True, slots=True)
class ServiceSample:
    """State of the service at `time_s`; `running / slots` is the batch fill."""

    time_s: float
    running: int
    slots: int
    waiting: int = 0
    used_blocks: int = 0
    blocks: int = 0
    preemptions: int = 0
    """Since the service started; the same for `plans`."""
    plans: int = 0


@dataclass(frozen=True, slots=True)
class LoopDelays:
    """Delays with which the client's event loop woke from sleeps of `interval_s` during the run, in seconds.

    An arrival is timed when the loop handles it, so these delays are the error of all times of the run. `cpu_share` is
    the CPU time of the client's process over the run's time (1: one core was always busy).
    """

    interval_s: float
    count: int
    p50_s: float
    p99_s: float
    max_s: float
    cpu_share: float


@dataclass(frozen=True, slots=True)
class RunHeader:
    """Description of a run: the system, the load, the hardware, and the command that repeats it."""

    system: str
    """Name in tables and legends: "fcfs", "static", "generate, padded", "vLLM"."""
    target: str
    """Address of the system: "grpc://host:port", "http://host:port/v1", "transformers in this process"."""
    model: str
    workload: str
    """Name of the trace, or the distribution of lengths."""
    arrivals: str
    """In words: "Poisson, 2.00/s", "as in the trace, 1.5 times as fast", "all at once"."""
    card: str
    """Hardware that computed: the GPU's name, or the CPU and its cores. Runs on different cards are never compared."""
    command: str
    rate: float | None = None
    """Mean offered rate in requests per second; None if all arrived at once."""
    seed: int = 0
    commit: str = ""
    date: str = ""
    """UTC, ISO 8601."""
    warmup_requests: int = 0
    """Number of requests sent before the run's start and not recorded."""
    token_counts: str = TokenCounts.TOLD.value
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of workload and system: divisors, jitter, slots, threads, policy, ..."""
    notes: list[str] = field(default_factory=list)
    """Sentences that a reader needs to interpret the numbers."""


@dataclass(slots=True)
class Run:
    """A measured run; `requests` are in order of completion."""

    header: RunHeader
    requests: list[RequestRecord] = field(default_factory=list)
    samples: list[ServiceSample] = field(default_factory=list)
    loop_delays: LoopDelays | None = None
    """None if the client had no event loop (a library driven in this process)."""


class RecordFileError(ValueError):
    """The file is not a run; the message names the file and, in a text file, the line."""
