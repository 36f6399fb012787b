"""Constrained requests of one engine: compiles grammars before requests wait for a slot, makes masks while they run.

Mask processes do both (see `mask_client`). One thread requests grammars and another masks, because a grammar may take
a second and a mask must not. The engine takes the outcomes between two steps. A matcher's state depends only on its
tokens, so it is rebuilt from them wherever a sequence resumes: in another mask process, on another runner, or under a
new scheduler.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog

from roster_protos import plan_pb2
from scheduler_svc.constrained.background import Background
from scheduler_svc.constrained.compile_line import CompileLine
from scheduler_svc.constrained.fork_server import MasksUnavailable
from scheduler_svc.constrained.mask_client import MaskClient
from scheduler_svc.constrained.mask_requests import MaskRequests
from scheduler_svc.constrained.source import UnusableGrammar
from scheduler_svc.link.links import Runners
from scheduler_svc.model.output_state import OutputState
from scheduler_svc.model.refusal import EngineRefusal, RefusalReason
from scheduler_svc.model.sequence import End, FinishReason, Phase, Request, Sequence
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.runner_pool import RunnerPool

START_AFTER_S = 2.0
"""Delay from the first runner to the start of the mask processes, unless a request needs them earlier.

It lets the other processes start first.
"""

MOST_OF_A_TENANT = 256
"""Maximum number of one tenant's grammars that wait to be compiled."""

MOST = 4096
"""Maximum number over all tenants."""

log = structlog.get_logger()


@dataclass(slots=True, frozen=True)
class _Problem:
    """The reason why a request's sequences have no matchers."""

    message: str
    field: str = ""
    """The offending field, as a path in the public message; "" if the service is at fault."""


@dataclass(slots=True, frozen=True)
class _Job:
    request: Request
    then: Callable[[Request], None]


@dataclass(slots=True, frozen=True)
class _Prepared:
    """Outcome of a job."""

    seconds: float
    grammar: str = ""
    outputs: list[OutputState] | None = None
    problem: _Problem | None = None


class Constraints:
    """Constraints of one engine. Called by the engine's thread only."""

    def __init__(self, requests: Requests, pool: RunnerPool, runners: Runners, threads: int) -> None:
        """`threads`: number of threads that make the masks of one plan."""
        self._requests = requests
        self._pool = pool
        self._threads = threads
        self.wake: Callable[[], None] = lambda: None
        """Wakes the engine; called by other threads."""
        self.starts_early = False
        """Whether the processes start once the model is known, before a request needs them."""
        self._compiling = Background(lambda: self.wake())
        self._masking = Background(lambda: self.wake())
        self._starts_at = math.inf
        self._new_client: Callable[[plan_pb2.Model, int], MaskClient] = MaskClient.of
        self._client: MaskClient | None = None
        self._clock = time.monotonic
        self._plans: CompileLine[_Job] = CompileLine()
        self._waiting: Counter[str] = Counter()
        self._at_work = False
        self.masks = MaskRequests(
            pool,
            runners,
            lambda: self._the_client,
            lambda: self._requests.ledger.now_s,
            self._end,
            self._masking,
        )

    def work_in(
        self,
        compiling: Background,
        masking: Background,
        new_client: Callable[[plan_pb2.Model, int], MaskClient],
        clock: Callable[[], float],
    ) -> None:
        """Replaces the threads, the client and the clock (in seconds, for the cost of a grammar) with the given ones.

        Must be called before the first request.
        """
        self._compiling, self._masking = compiling, masking
        self.masks.thread = masking
        self._new_client, self._clock = new_client, clock

    def expect(self) -> None:
        """Schedules the start of the processes if `starts_early`; called once the model is known."""
        if self.starts_early and self._client is None and self._starts_at == math.inf:
            self._starts_at = self._requests.ledger.now_s + START_AFTER_S

    def _start(self) -> None:
        self._starts_at = math.inf
        client = self._the_client
        self._compiling.run(lambda: _started(client), lambda nothing: None)

    def close(self) -> None:
        """Stops the mask processes."""
        if self._client is not None:
            self._client.close()

    @property
    def deaths(self) -> dict[str, int]:
        """Number of mask processes that have died, by role."""
        return {"grammars": 0, "masks": 0} if self._client is None else self._client.deaths

    # ------------------------------------------------------------------ grammars

    def is_crowded(self, tenant: str) -> bool:
        """Returns whether too many grammars wait to be compiled to accept another of this tenant."""
        return self._waiting[tenant] >= MOST_OF_A_TENANT or len(self._plans) >= MOST

    def prepare(self, request: Request, then: Callable[[Request], None]) -> None:
        """Calls `then(request)` once its grammar is compiled and its sequences have their matchers.

        A request whose grammar can't be used is refused, or ended if it was accepted before. A request that has ended
        meanwhile is dropped. Tenants share the compiler by the time that their grammars take (see `CompileLine`).
        """
        self._plans.push(request.tenant, _Job(request, then))
        self._waiting[request.tenant] += 1
        self._compile_next()

    def _compile_next(self) -> None:
        while not self._at_work and (job := self._plans.pop()) is not None:
            self._waiting[job.request.tenant] -= 1
            if not self._waiting[job.request.tenant]:
                del self._waiting[job.request.tenant]
            if job.request.finished:
                self._plans.charge(job.request.tenant, 0.0)
                continue
            self._at_work = True
            self._compile(job)

    def _compile(self, job: _Job) -> None:
        client, clock, request = self._the_client, self._clock, job.request
        kind, text, count = request.grammar_kind, request.grammar, len(request.sequences)
        tokens = request.sequences[0].tokens
        received = tokens[request.prompt_len : request.prompt_len + request.num_received].tolist()
        min_tokens, stop_ids = request.sampling.min_tokens, sorted(request.stop_ids)
        self._compiling.run(
            lambda: _prepared(client, clock, kind, text, received, count, min_tokens, stop_ids),
            lambda prepared: self._take_prepared(job, prepared),
        )

    def _take_prepared(self, job: _Job, prepared: _Prepared) -> None:
        self._at_work = False
        request = job.request
        self._plans.charge(request.tenant, prepared.seconds)
        outputs = prepared.outputs or []
        if request.finished:
            for output in outputs:
                self.masks.release(output)
        elif prepared.problem is not None:
            self._give_up(request, prepared.problem)
        else:
            request.grammar = prepared.grammar
            for sequence, output in zip(request.sequences, outputs, strict=True):
                if sequence.phase is Phase.FINISHED:
                    self.masks.release(output)
                    continue
                sequence.output, sequence.num_matched, sequence.forced = output, 0, []
                self._requests.rank_anew(sequence)  # the policy may have changed meanwhile
            job.then(request)
        self._compile_next()

    def release_matcher(self, sequence: Sequence) -> None:
        """Releases the matcher of a sequence that has ended."""
        if sequence.output is not None:
            self.masks.release(sequence.output)
            sequence.output = None

    # ------------------------------------------------------------------ threads

    @property
    def busy(self) -> bool:
        """Whether a thread compiles or makes masks, so that `collect` has something to wait for."""
        return self._compiling.busy or self._masking.busy

    def collect(self) -> None:
        """Takes the outcomes of the threads; called between two steps."""
        if self._requests.ledger.now_s >= self._starts_at:
            self._start()
        self._compiling.collect()
        self._masking.collect()

    # ------------------------------------------------------------------ ends

    def _end(self, sequence: Sequence, problem: str, unavailable: bool) -> None:
        """Ends a sequence without a mask; `unavailable`: no mask process could be started."""
        if unavailable:
            self._requests.finish(sequence, End(FinishReason.UNAVAILABLE, message=problem))
        else:
            self._fail(sequence, problem)

    def _fail(self, sequence: Sequence, problem: str) -> None:
        """Ends the sequence with an error, or refuses its request if none of the sequences has a new token."""
        request = sequence.request
        known = request.prompt_len + request.num_received
        if request.rebuilt or any(len(each.tokens) > known for each in request.sequences):
            message = f"the output can't be continued to match its constraint: {problem}"
            self._requests.finish(sequence, End(FinishReason.ERROR, message=message))
        elif not request.finished:
            self._refuse(request, _Problem(problem, _field(request.grammar_kind)))

    def _give_up(self, request: Request, problem: _Problem) -> None:
        """Refuses the request, or ends it if it was accepted before: none of its sequences can begin."""
        if request.accepted:
            end = End(FinishReason.ERROR, message=f"constraint: {problem.message}")
            self._requests.finish_request(request, end)
        else:
            self._refuse(request, problem)

    def _refuse(self, request: Request, problem: _Problem) -> None:
        """Withdraws the request; its client receives the refusal, and no end of its sequences."""
        if problem.field:
            message = f"{problem.field}: {problem.message}"
            refusal = EngineRefusal(grpc.StatusCode.INVALID_ARGUMENT, message, problem.field)
        else:
            refusal = EngineRefusal(grpc.StatusCode.UNAVAILABLE, problem.message, retry_after_s=1.0)
        self._requests.totals.refuse(RefusalReason.CONSTRAINT)
        self._requests.outbox.message(request.owner, refusal.to_message(request.handle))
        self._requests.book.abandon(request)
        self._requests.finish_request(request, End(FinishReason.CANCELLED, message=refusal.message))

    @property
    def _the_client(self) -> MaskClient:
        if self._client is None:
            model = self._pool.model
            if model is None:
                raise RuntimeError("a constrained request came before the first runner")
            self._client = self._new_client(model, self._threads)
        return self._client


def _started(client: MaskClient) -> None:
    try:
        client.start()
    except MasksUnavailable as error:
        log.error("constraints can't be used yet", reason=str(error))


def _prepared(
    client: MaskClient,
    clock: Callable[[], float],
    kind: str,
    text: str,
    received: list[int],
    count: int,
    min_tokens: int,
    stop_ids: list[int],
) -> _Prepared:
    """Compiles the grammar, checks `received` against it, and opens `count` matchers at its beginning."""
    began_at = clock()
    grammar, outputs, problem = "", None, None
    field = _field(kind)
    try:
        grammar, taken = client.check(kind, text, received)
        if taken < len(received):
            message = f"{received[taken]} can't follow the tokens before it under this constraint"
            problem = _Problem(message, f"received_token_ids[{taken}]")
        else:
            outputs = client.open(grammar, count, min_tokens, stop_ids)
    except UnusableGrammar as error:
        problem = _Problem(str(error), field)
    except MasksUnavailable as error:
        problem = _Problem(str(error))
    except Exception as error:  # one request's data must not end the thread
        log.exception("a grammar failed to compile")
        problem = _Problem(f"{type(error).__name__}: {error}", field)
    return _Prepared(clock() - began_at, grammar, outputs, problem)


def _field(kind: str) -> str:
    """Returns the constraint's path in the public message."""
    return f"constraint.{kind}" if kind else "constraint"
