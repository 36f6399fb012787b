"""A request and its sequences: what the scheduler knows of each stream of tokens.

The counters of a *running* sequence (planned, pending, computed, in_flight) are columns of its runner's `SlotTable`,
because every step moves all of them at once; here stands what outlives a slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from roster_protos import plan_pb2
from scheduler_svc.model.home import Home
from scheduler_svc.model.output_state import OutputState
from scheduler_svc.model.prompt_logprobs import PromptLogprobs
from scheduler_svc.model.refusal import EngineRefusal
from scheduler_svc.model.suspicion import Suspicion
from scheduler_svc.model.token_log import TokenLog
from scheduler_svc.policy import RequestView
from scheduler_svc.policy.rank import Rank

NOBODY = b""
"""Owner of a request that no front worker follows."""


class FinishReason(IntEnum):
    """Why a sequence ended; the values are those of roster.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5
    UNAVAILABLE = 6


class Phase(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, frozen=True)
class End:
    """How a sequence ended: the reason and, for STOP, what matched."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str = ""
    message: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: prompt and sampled tokens, block table, place on a runner.

    `stale` counts rows still in flight from before a preemption: they bring tokens but touch no counter, and the
    sequence is not admitted again before they are back.
    """

    id: int
    request: Request
    index: int
    log: TokenLog
    """Prompt and sampled tokens, except the latest few of a running sequence (see `SlotTable`): read `tokens`."""
    limit: int
    """Most tokens, prompt included: the sequence ends when it has them."""
    rank: Rank = Rank.of((), 0)  # noqa: RUF009  (it is immutable)
    phase: Phase = Phase.WAITING
    slot: int = -1
    """Slot on the runner while RUNNING; meaningless otherwise."""
    scheduler: Home[Sequence] | None = None
    """The roster it runs on."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Names of the full blocks of `tokens`, as far as they were needed."""
    hashed_block_size: int = 0
    """Tokens of the blocks that `hashes` names."""
    stale: int = 0
    cached_tokens: int = 0
    """Prompt tokens that a prefix hit spared at the first admission."""
    admitted: bool = False
    """It has had a slot before."""
    queue_s: float | None = None
    """Seconds from its request's arrival to its first slot; None before that, or if a former scheduler gave it."""
    preemptions: int = 0
    last_token_at: float = math.nan
    """When its last token came, while it is in no slot; NaN before the first."""
    end: End | None = None
    logprobs: list[plan_pb2.RowLogprobs] = field(default_factory=list)
    output: OutputState | None = None
    """Where it stands in its request's grammar, once that is compiled."""
    num_matched: int = 0
    """Generated tokens that the matcher was told, or is about to be."""

    @property
    def tokens(self) -> TokenLog:
        """All known tokens: the prompt, then what was sampled."""
        if self.scheduler is not None:
            self.scheduler.settle(self.slot)
        return self.log

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt (received tokens count as generated)."""
        return self.request.prompt_len

    def column(self, start: int, stop: int) -> bytes:
        """Tokens `start` to `stop` - 1 as a little-endian int32 column; those of the prompt are not packed again."""
        prompt = self.request.prompt
        column = prompt[4 * start : 4 * stop]
        if 4 * stop > len(prompt):
            column += self.tokens[max(start, self.prompt_len) : stop].tobytes()
        return column

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.request.prompt_len


@dataclass(slots=True, eq=False)
class Request:
    """A validated request, as the engine keeps it: identity, parameters, time, and its sequences."""

    handle: int
    """Name between the owning front worker and the engine."""
    owner: bytes
    """ZeroMQ identity of that worker; `NOBODY` when it is gone."""
    tenant: str
    request_id: str
    digest: bytes
    body: bytes
    prompt: bytes
    """Its tokens as a little-endian int32 column."""
    prompt_len: int
    num_received: int
    sampling: plan_pb2.Sampling
    seed: int
    priority: int
    cache_salt: str
    """Prefixes are shared only between requests of equal salts."""
    arrival_s: float
    deadline_s: float | None
    ttft_target_ms: int | None
    itl_target_ms: int | None
    keep_s: float
    max_tokens: int
    sequences: list[Sequence] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()
    open_ended: bool = False
    """Its client set no `max_tokens`: a sequence may be cut to what a runner holds."""
    prompt_logprobs: PromptLogprobs | None = None
    """Those of its prompt, if they are asked for: all of it is computed then, whatever is cached."""
    view: RequestView | None = None
    """What policies see of it, once it was asked for."""
    gone_until_at: float | None = None
    """Until when the request waits for a client whose stream was cut; None while somebody listens."""
    place_at: float | None = None
    """The arrival by which it is ranked, if that was promised (see `RetryPromises`)."""
    arrival_unix_s: float = 0.0
    """`arrival_s` as seconds since 1970: what a scheduler on another machine understands."""
    grammar: str = ""
    """What its output must match: as `grammar_kind` says, and as llguidance takes it once that is compiled; "" for
    anything."""
    grammar_kind: str = ""
    """How its client wrote it: a field of roster.v1.Constraint; "" for as llguidance takes it."""
    accepted: bool = True
    """Its worker knows its sequences; not before its grammar is compiled."""
    rebuilt: bool = False
    """It was made from a runner's snapshot: its client submitted it to an earlier scheduler."""
    is_left: bool = False
    """Its client is gone and did not come back in time, or was refused it after all: who asks for it later finds
    nothing, and sends it again."""
    refusal: EngineRefusal | None = None
    """The status with which it ended, where that was no finish."""
    suspicion: Suspicion = field(default_factory=Suspicion)
    """Losses of runners that it may have caused (see `Quarantine`)."""

    def drop_sequences(self) -> None:
        """Nobody asks for it any more. Ends the circle with its sequences: their memory comes back now, and not with
        some garbage collection."""
        self.sequences = []

    @property
    def finished(self) -> bool:
        """Every choice has ended."""
        return all(sequence.phase is Phase.FINISHED for sequence in self.sequences)

    @property
    def limit(self) -> int:
        """Most tokens of one of its sequences, prompt included."""
        return max((sequence.limit for sequence in self.sequences), default=0)

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of its prompt are asked for."""
        return self.prompt_logprobs is not None

    @property
    def cancelled(self) -> bool:
        """It has ended, and some choice because it was cancelled."""
        ends = [sequence.end for sequence in self.sequences]
        return all(ends) and any(end is not None and end.reason is FinishReason.CANCELLED for end in ends)

    @property
    def num_tokens(self) -> int:
        """Known tokens of all its choices: more of them is progress."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def key(self) -> tuple[str, str]:
        """Public identity: ids belong to a tenant."""
        return self.tenant, self.request_id
