"""Read-only views of requests, sequences, load and results for policies. Times are in seconds on the engine's clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from scheduler_svc.policy.rank import Rank


@dataclass(slots=True, frozen=True)
class RequestView:
    """A request as policies see it."""

    request_id: str
    tenant: str
    arrival_s: float
    """Arrival. If the request was refused and retries when RetryInfo said, this is earlier, so that it keeps its place
    in the queue."""
    priority: int
    prompt_tokens: int
    max_tokens: int
    num_choices: int
    deadline_s: float | None = None
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None
    conversation_id: str = ""
    kv_retain_s: float | None = None
    """How long its client says that the prefix is worth keeping after its end."""
    next_turn_s: float | None = None
    """When, after its end, its client expects the conversation's next request."""


class WaitingView(NamedTuple):
    """A waiting sequence. On admission it has `tokens` to compute, `cached` of which are in the prefix cache of the
    runner being planned (0 without prefix sharing).

    It is a tuple, as is every view created often: creating one costs a third of a frozen dataclass.
    """

    sequence_id: int
    request: RequestView
    rank: Rank
    tokens: int
    cached: int
    waited_s: float


class RunningView(NamedTuple):
    """A running sequence. Preempting it loses `computed` positions and frees `blocks`."""

    sequence_id: int
    request: RequestView
    rank: Rank
    computed: int
    generated: int
    blocks: int


class RunnerView(NamedTuple):
    """A runner that could take a running sequence."""

    runner_id: str
    role: str
    """"decode" or "both"."""
    free_slots: int
    slots: int
    free_blocks: int
    blocks: int
    decoding: int
    """Sequences that decode there."""
    context: int
    """KV positions of these."""
    cached: int
    """Tokens of the sequence's prompt that the runner has in its cache, which need not be copied."""
    step_times: StepTimes


class StepTimes(Protocol):
    """A runner's step-time model: seeded by what the runner measured at start, corrected by its steps. Times are in
    seconds."""

    @property
    def known(self) -> bool:
        """Returns whether it predicts; before, all times are 0 or rough."""

    @property
    def on_gpu(self) -> bool:
        """Returns whether the runner computes on a GPU."""

    @property
    def row_s(self) -> float:
        """Returns the time of a step that decodes one row of a short context."""

    @property
    def position_s(self) -> float:
        """Returns the time that one more prompt position takes in a large step, without its attention."""

    def seconds(self, prefill_tokens: float, decode_rows: int, context: int, start: int = 0) -> float:
        """Returns the predicted time of a step with a chunk of `prefill_tokens` that starts at position `start`."""

    def verify_s(self, rows: int, drafts: float, context: int) -> float:
        """Returns the predicted time of a decode step of `rows` rows that verifies `drafts` drafts in all; 0 if nothing
        is known. On a GPU, where all rows cost as much as the one with the most, `drafts` are the rows times those."""

    @property
    def overhead_s(self) -> float:
        """Returns the time of a step with prompts besides what its positions and rows take."""

    @property
    def prompt_share(self) -> float:
        """Returns the share of the recent steps that had prompts."""

    def delay_s(self, share: float) -> float:
        """Returns by how much longer than predicted a share `share` of steps with prompts take at most, at least 0.

        It includes launch, link and the scheduler's own delays.
        """

    @property
    def efficient_prefill(self) -> int:
        """Returns the prompt positions of a step from which larger ones save little time per position."""

    @property
    def is_sparse(self) -> bool:
        """Returns whether steps of more rows read more weights, as in a mixture of experts."""

    def planned_s(self, target_s: float, share: float) -> float:
        """Returns the predicted time of steps with prompts, a share `share` of which take at most `target_s`.

        It leaves room for `delay_s`, but for no more than a fifth of the target: a delay that does not depend on the
        step's size is not avoided by smaller steps.
        """

    def prefill_tokens_within(
        self, seconds: float, decode_rows: int, context: int, start: int = 0, left: float = math.inf
    ) -> float:
        """Returns the maximum number of prompt positions, in whole tiles, of a step predicted to take `seconds`.

        The first `left` of them continue a prompt at position `start`; the others begin new ones. If no whole tile
        fits, returns the number that would fit without tiles; it is negative if the decoding rows alone take longer.
        """


class Load(NamedTuple):
    """State of one runner and of the shared queue when a step is planned.

    For `admit` it covers all runners: counts are sums, except that the queue is shared, and `block_size` and
    `tile_tokens` are the largest and `itl_target_s` the tightest of any runner. A step runs on one runner, so `budget`
    and estimates of step times take `of_one_runner`.
    """

    running: int
    decoding: int
    slots: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    blocks: int
    block_size: int
    max_step_tokens: int
    now_s: float = 0.0
    context: int = 0
    """KV positions of the decoding sequences, which this step's attention reads."""
    prompt_backlog: int = 0
    """Prompt positions that running sequences have yet to compute."""
    itl_target_s: float = math.inf
    """Tightest ITL target of the decoding sequences; infinite if none has a target."""
    tile_tokens: int = 1
    """Positions per tile; a step's time grows by whole tiles, as a partly filled tile takes as long as a full one."""
    runners: int = 1
    """Runners over which the sums are taken."""
    step_times: StepTimes | None = None
    """The runner's step-time model; of several runners, the slowest one's. None in tests that have none."""
    prompt_start: int = 0
    """Position at which the first prompt under way continues."""
    prompt_left: int = 0
    """Positions that it has yet to compute; 0 if no prompt is under way."""
    service_itl_target_s: float | None = None
    """The service's ITL target (setting `itl_target_ms`); 0: none, throughput alone counts; None: not set."""
    tokens_per_row: float = 1.0
    """Tokens that a decoding row gained in the last steps, on average: above 1 where drafts are accepted."""
    drafts_per_row: float = 0.0
    """Drafts that cost time in these steps, of each decoding row."""
    queue_runners: int = 1
    """Runners that serve the shared queue, so that one runner's part of it is 1 / `queue_runners`."""

    def prefill_tokens_within(self, seconds: float) -> float:
        """Returns the maximum number of prompt positions with which a step is predicted to take `seconds`.

        See `StepTimes.prefill_tokens_within`; infinite without a step-time model.
        """
        if self.step_times is None:
            return math.inf
        left = self.prompt_left or math.inf
        return self.step_times.prefill_tokens_within(seconds, self.decoding, self.context, self.prompt_start, left)

    @property
    def row_token_s(self) -> float:
        """Seconds that a decoding row takes for a token, in steps like the last ones; of one runner's load. 0 if
        unknown."""
        if self.step_times is None:
            return 0.0
        if not self.drafts_per_row:
            return self.step_times.seconds(0, self.decoding, self.context)
        drafts = self.drafts_per_row * self.decoding
        return self.step_times.verify_s(self.decoding, drafts, self.context) / self.tokens_per_row

    def of_one_runner(self) -> Load:
        """Returns one runner's equal share of the load, rounded down. The fields of the queue still cover all of it."""
        runners = self.runners
        if runners <= 1:
            return self
        return self._replace(
            running=self.running // runners,
            decoding=self.decoding // runners,
            slots=self.slots // runners,
            free_blocks=self.free_blocks // runners,
            blocks=self.blocks // runners,
            max_step_tokens=self.max_step_tokens // runners,
            context=self.context // runners,
            prompt_backlog=self.prompt_backlog // runners,
            runners=1,
        )


class Account(NamedTuple):
    """Service of one tenant since the engine started, and its lift (see `Policy.tenant_key`)."""

    prompt_tokens: int = 0
    """Prompt tokens computed for the tenant; prefix hits are not charged."""
    sampled_tokens: int = 0
    lift: float = 0.0


class LedgerView(Protocol):
    """State that outlives a policy: the engine's clock, an account per tenant, and how much waits for what runners."""

    @property
    def now_s(self) -> float:
        """Returns the engine's time in seconds."""

    def account(self, tenant: str) -> Account:
        """Returns the tenant's account, empty if it was never served."""

    @property
    def waiting_tokens(self) -> int:
        """Returns the prompt tokens that wait in the queue."""

    @property
    def runners(self) -> int:
        """Returns the number of runners that serve."""

    @property
    def step_times(self) -> StepTimes | None:
        """Returns the slowest runner's step-time model; None while there is no runner."""

    @property
    def itl_target_s(self) -> float | None:
        """Returns the service's ITL target, as `Load.service_itl_target_s`."""


class FirstToken(NamedTuple):
    """First token of a sequence."""

    request: RequestView
    ttft_s: float


class Ended(NamedTuple):
    """End of a sequence that finished normally, with its number of generated tokens."""

    request: RequestView
    generated: int


_NO_GAPS = np.zeros(0)
_NO_GAPS.setflags(write=False)


class StepReport(NamedTuple):
    """Report of a step's result, for policies that learn."""

    now_s: float
    rows: int
    sampled: int
    round_trip_s: float
    """Time from sending the plan to receiving the result, including the wait behind the previous plan."""
    step_s: float = 0.0
    """Runner time of the step: since the previous result, or since the plan was sent if that was later."""
    decode_rows: int = 0
    prefill_tokens: int = 0
    context: int = 0
    """KV positions before the decoding rows, which their attention read."""
    tile_tokens: int = 1
    """The runner's positions per tile, as in `Load`."""
    gaps_s: npt.NDArray[np.float64] = _NO_GAPS
    """Inter-token times that ended with this result, in seconds, one per token that is not its sequence's first."""
    first_tokens: tuple[FirstToken, ...] = ()
    ended: tuple[Ended, ...] = ()
    drafted: int = 0
    """Drafts that the decoding rows verified."""
    accepted: int = 0
    """Drafts that were accepted; each is a token with a gap of 0."""
