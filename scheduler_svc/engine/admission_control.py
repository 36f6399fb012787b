"""Which requests may wait, and which are refused at once, with the time to come back.

| refused with       | because                                                                    |
|--------------------|----------------------------------------------------------------------------|
| ALREADY_EXISTS     | the id is in use with another body                                         |
| UNAVAILABLE        | the service drains, or no runner was ever there                            |
| INVALID_ARGUMENT   | no runner that is there, on probation or not, can ever hold the request    |
| RESOURCE_EXHAUSTED | a limit of its tenant; its deadline can't be met; the policy; the queue is full |

The checks go from certain to costly; only the last one, a full queue, may shed somebody else's request instead.
"""

from __future__ import annotations

import math

import grpc
import numpy as np

from scheduler_svc.constrained.constraints import Constraints
from scheduler_svc.engine.early_refusal import EarlyRefusal, work_of
from scheduler_svc.model.refusal import EngineRefusal, RefusalReason
from scheduler_svc.model.sequence import End, FinishReason, Request
from scheduler_svc.policy import Load, Refuse
from scheduler_svc.requests.drain import Drain
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.policy_views import request_view
from scheduler_svc.settings.scheduler_settings import SchedulerSettings


class AdmissionControl:
    """Judges requests on what runs and waits. `shed` says what an accepted request costs others."""

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        placement: Placement,
        constraints: Constraints,
        drain: Drain,
        settings: SchedulerSettings,
    ) -> None:
        self._requests = requests
        self._pool = pool
        self._constraints = constraints
        self._drain = drain
        self._settings = settings
        self._policy = requests.policy
        self.early = EarlyRefusal(requests, pool, placement, settings)

    def refusal(self, request: Request, known: Request | None) -> EngineRefusal | None:
        """Why this request can't wait here; None if it can. `known`: another request of its id."""
        refusal = self._unfit(request, known) or self._over_limit(request) or self.early.refusal(request)
        if refusal is None and request.grammar and self._constraints.is_crowded(request.tenant):
            message = "too many constraints wait to be compiled: try again later"
            refusal = EngineRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, "", 1.0, RefusalReason.QUEUE_FULL)
        if refusal is not None:
            if refusal.promise is not None:
                self.early.promises.keep(request, refusal.promise, self._requests.ledger.now_s)
            return refusal
        if self._policy.admits:
            answer = self._policy.admit(request_view(request), self._load())
            if isinstance(answer, Refuse):
                return EngineRefusal(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, answer.reason, "", answer.retry_after_s, RefusalReason.POLICY
                )
        refusal = self._make_room(request)
        if refusal is None:
            slots = sum(scheduler.table.num_slots for scheduler in self._pool.schedulers.values())
            self.early.promises.redeem(request)
            self._requests.rate.accepted(work_of(request.sequences), slots)
        return refusal

    def _unfit(self, request: Request, known: Request | None) -> EngineRefusal | None:
        if known is not None:
            message = f"request_id {request.request_id!r} is in use with another body: choose another id"
            return EngineRefusal(grpc.StatusCode.ALREADY_EXISTS, message, "request_id", reason=RefusalReason.ID_IN_USE)
        if self._drain.begun:
            return EngineRefusal(
                grpc.StatusCode.UNAVAILABLE,
                "the service is shutting down: use another one",
                "",
                1.0,
                RefusalReason.DRAINING,
            )
        if self._pool.model is None:
            return EngineRefusal(
                grpc.StatusCode.UNAVAILABLE, "no runner is there yet: try again", "", 1.0, RefusalReason.NO_RUNNER
            )
        most, needed = self._pool.max_tokens, request.limit
        # What was begun by a runner that is gone waits aside for one that holds it, as if it had been here all along.
        if self._pool.schedulers and needed > most and not request.num_received:
            message = (
                f"prompt and max_tokens ({needed} tokens) can never fit a runner that is there: the largest holds "
                f"{most} tokens of one sequence; lower max_tokens"
            )
            return EngineRefusal(
                grpc.StatusCode.INVALID_ARGUMENT, message, "stop.max_tokens", reason=RefusalReason.TOO_LONG
            )
        return None

    def _over_limit(self, request: Request) -> EngineRefusal | None:
        excess = self._requests.shares.excess(request)
        if not excess:
            return None
        # Its sequences start in turn with those of others.
        turns = len(self._requests.queue) / max(1, self._requests.shares.waiting(request.tenant))
        message = f"tenant {request.tenant!r} is at its limit ({excess}): try again later"
        retry_s = self.early.retry_s(self._requests.shares.surplus(request) * turns)
        return EngineRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, "", retry_s, RefusalReason.TENANT_LIMIT)

    def _make_room(self, request: Request) -> EngineRefusal | None:
        """Refuses when the queue is full, unless a tenant that has more of it gives way."""
        settings = self._settings
        queue, sequences = self._requests.queue, len(request.sequences)
        too_many = len(queue) + sequences - settings.max_waiting_requests
        too_many_tokens = queue.num_tokens + request.prompt_len * sequences - settings.max_waiting_tokens
        if too_many <= 0 and too_many_tokens <= 0:
            return None
        shed = self._requests.shares.to_shed(request, too_many, too_many_tokens)
        if shed is None:
            bound = f"{len(queue)} sequences with {queue.num_tokens} tokens wait"
            message = f"the queue is full ({bound}): try again later"
            retry_s = self.early.retry_s(self._leaving(too_many, too_many_tokens))
            return EngineRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, "", retry_s, RefusalReason.QUEUE_FULL)
        message = "the queue is full, and tenant {!r} has the greatest part of it: try again later"
        for other in shed:
            retry_s = self.early.retry_s(self._leaving(too_many, too_many_tokens))
            refusal = EngineRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message.format(other.tenant), "", retry_s)
            self._shed(other, refusal)
        return None

    def _shed(self, request: Request, refusal: EngineRefusal) -> None:
        """Takes back a request that waits; its client hears the refusal."""
        self._requests.totals.refuse(RefusalReason.SHED)
        self._requests.outbox.message(request.owner, refusal.to_message(request.handle))
        request.is_left = True
        self._requests.finish_request(request, End(FinishReason.CANCELLED, message=refusal.message))

    def _leaving(self, sequences: int, tokens: int) -> float:
        """How many sequences have to leave the queue so that there are so many fewer, with so many tokens fewer."""
        queue = self._requests.queue
        return max(sequences, tokens * len(queue) / max(1, queue.num_tokens))

    def _load(self) -> Load:
        """The sum over all runners."""
        loads = [s.load(self._requests.queue, np.flatnonzero(s.table.lag == 1)) for s in self._pool.schedulers.values()]
        return Load(
            running=sum(load.running for load in loads),
            decoding=sum(load.decoding for load in loads),
            slots=sum(load.slots for load in loads),
            waiting=len(self._requests.queue),
            waiting_tokens=self._requests.queue.num_tokens,
            free_blocks=sum(load.free_blocks for load in loads),
            blocks=sum(load.blocks for load in loads),
            block_size=max((load.block_size for load in loads), default=1),
            max_step_tokens=sum(load.max_step_tokens for load in loads),
            now_s=self._requests.ledger.now_s,
            context=sum(load.context for load in loads),
            prompt_backlog=sum(load.prompt_backlog for load in loads),
            itl_target_s=min((load.itl_target_s for load in loads), default=math.inf),
            tile_tokens=max((load.tile_tokens for load in loads), default=1),
            runners=len(loads),
        )
