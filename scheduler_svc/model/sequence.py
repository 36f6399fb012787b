"""A request and its sequences: the scheduler's state of each token stream.

The counters of a *running* sequence (planned, known, computed, ...) are columns of its runner's `SlotTable`, because
every step moves all of them at once. This module has the state that outlives a slot.
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
    """The reason for a sequence's end; the values are those of roster.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5
    UNAVAILABLE = 6


class Phase(Enum):
    """State of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, frozen=True)
class End:
    """A sequence's end: the reason and, for STOP, the match."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str = ""
    message: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: prompt and sampled tokens, block table, place on a runner.

    `stale` counts rows still in flight from before a preemption: they add tokens but change no counter, and the
    sequence is admitted again only after they have returned.
    """

    id: int
    request: Request
    index: int
    log: TokenLog
    """Prompt and sampled tokens, except the latest few of a running sequence (see `SlotTable`): read `tokens`."""
    limit: int
    """Maximum number of tokens, prompt included: the sequence ends when it reaches them."""
    rank: Rank = Rank.of((), 0)  # noqa: RUF009  (it is immutable)
    phase: Phase = Phase.WAITING
    slot: int = -1
    """Slot on the runner while RUNNING; meaningless otherwise."""
    scheduler: Home[Sequence] | None = None
    """The scheduler it runs on; None unless RUNNING."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Names of the full blocks of `tokens`, as far as they have been needed."""
    hashed_block_size: int = 0
    """Tokens per block of the blocks in `hashes`."""
    stale: int = 0
    swapped: int = 0
    """Positions whose KV was offloaded to its runner's host pool when it was preempted; 0 once it is admitted again."""
    cached_tokens: int = 0
    """Prompt tokens reused by a prefix hit at the first admission."""
    drafted_tokens: int = 0
    """Tokens drafted and verified in the slots that it has left."""
    accepted_tokens: int = 0
    """Those of them that were accepted."""
    admitted: bool = False
    """Whether it has had a slot."""
    queue_s: float | None = None
    """Seconds from its request's arrival to its first slot; None before, or if a former scheduler admitted it."""
    preemptions: int = 0
    last_token_at: float = math.nan
    """When its last token arrived, kept here while it has no slot; NaN before the first."""
    end: End | None = None
    logprobs: list[plan_pb2.RowLogprobs] = field(default_factory=list)
    output: OutputState | None = None
    """Its state in the request's grammar, once that is compiled."""
    num_matched: int = 0
    """Generated tokens that the matcher has consumed or is about to consume, forced ones that are still to come
    included."""
    forced: list[int] = field(default_factory=list)
    """The tokens that its grammar forces and that no result has confirmed, perhaps after others that one has; they end
    with the last of the `num_matched` tokens."""
    asked: bool = False
    """Whether its next mask has been requested and not arrived."""
    forced_share: float = 0.25
    """How often forced tokens have begun after one of its tokens; a usual value at first."""

    @property
    def tokens(self) -> TokenLog:
        """All known tokens: the prompt, then the sampled ones."""
        if self.scheduler is not None:
            self.scheduler.settle(self.slot)
        return self.log

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt (received tokens count as generated)."""
        return self.request.prompt_len

    def column(self, start: int, stop: int) -> bytes:
        """Returns tokens `start` to `stop` - 1 as a little-endian int32 column; those of the prompt are packed
        already."""
        prompt = self.request.prompt
        column = prompt[4 * start : 4 * stop]
        if 4 * stop > len(prompt):
            column += self.tokens[max(start, self.prompt_len) : stop].tobytes()
        return column

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.request.prompt_len

    def forced_from(self, position: int) -> list[int]:
        """Returns the forced tokens from this position on, which is at least the first that no result has confirmed.

        Raises RuntimeError if some are missing.
        """
        num_left = self.request.prompt_len + self.num_matched - position
        if num_left > len(self.forced):
            raise RuntimeError(f"sequence {self.id} lacks {num_left - len(self.forced)} of its forced tokens")
        return self.forced[-num_left:] if num_left > 0 else []


@dataclass(slots=True, eq=False)
class Request:
    """A validated request as the engine keeps it: identity, parameters, times, and its sequences."""

    handle: int
    """Its number between the owning front worker and the engine."""
    owner: bytes
    """ZeroMQ identity of that worker; `NOBODY` when it is gone."""
    tenant: str
    request_id: str
    digest: bytes
    body: bytes
    prompt: bytes
    """Prompt tokens as a little-endian int32 column."""
    prompt_len: int
    num_received: int
    sampling: plan_pb2.Sampling
    seed: int
    priority: int
    cache_salt: str
    """Only requests with equal salts share prefixes."""
    arrival_s: float
    deadline_s: float | None
    ttft_target_ms: int | None
    itl_target_ms: int | None
    keep_s: float
    max_tokens: int
    sequences: list[Sequence] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()
    open_ended: bool = False
    """The client set no `max_tokens`: a sequence may be limited to the capacity of a runner."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the prompt, if requested; then all of it is computed, whatever is cached."""
    view: RequestView | None = None
    """The request as policies see it, cached once it was needed."""
    gone_until_at: float | None = None
    """Until when the request waits for a client that lost its stream; None while a client is attached."""
    place_at: float | None = None
    """The arrival time by which it is ranked, if one was promised (see `RetryPromises`)."""
    arrival_unix_s: float = 0.0
    """`arrival_s` as seconds since 1970, which is valid on other machines too."""
    grammar: str = ""
    """Constraint on its output, in the form of `grammar_kind`; in llguidance's format once compiled; "" for none."""
    grammar_kind: str = ""
    """The form in which the client wrote it: a field of roster.v1.Constraint; "" for llguidance's format."""
    conversation_id: str = ""
    """Conversation of its tenant whose turn it is; "" for none."""
    kv_retain_s: float | None = None
    """Its client's hint how long its prefix is worth keeping after its end."""
    next_turn_s: float | None = None
    """Its client's hint when, after its end, the next turn comes."""
    speculates: bool = True
    """Whether tokens of it may be drafted."""
    accepted: bool = True
    """Its worker knows its sequences; False until its grammar is compiled."""
    rebuilt: bool = False
    """Whether it was rebuilt from a runner's snapshot: its client submitted it to an earlier scheduler."""
    is_left: bool = False
    """Its client left and did not return in time, or it was shed. An attach finds nothing, and the client sends it
    again."""
    refusal: EngineRefusal | None = None
    """The status with which it ended, if that was not a finish."""
    suspicion: Suspicion = field(default_factory=Suspicion)
    """Losses of runners that it may have caused (see `Quarantine`)."""

    def drop_sequences(self) -> None:
        """Breaks the reference cycle with its sequences once the request is forgotten, so that their memory is freed at
        once and not at some garbage collection."""
        self.sequences = []

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(sequence.phase is Phase.FINISHED for sequence in self.sequences)

    @property
    def limit(self) -> int:
        """Maximum number of tokens of any of its sequences, prompt included."""
        return max((sequence.limit for sequence in self.sequences), default=0)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are requested."""
        return self.prompt_logprobs is not None

    @property
    def cancelled(self) -> bool:
        """Whether all its choices have ended and at least one was cancelled."""
        ends = [sequence.end for sequence in self.sequences]
        return all(ends) and any(end is not None and end.reason is FinishReason.CANCELLED for end in ends)

    @property
    def num_tokens(self) -> int:
        """Known tokens of all its choices; an increase is progress."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def key(self) -> tuple[str, str]:
        """Public identity: tenant and request id."""
        return self.tenant, self.request_id
