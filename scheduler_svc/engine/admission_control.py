"""Admission control: accepts a request into the queue, or refuses it with the time after which to retry.

| refused with       | because                                                                    |
|--------------------|----------------------------------------------------------------------------|
| ALREADY_EXISTS     | the request id is in use with another body                                 |
| UNAVAILABLE        | the service drains, or no runner has ever joined                           |
| INVALID_ARGUMENT   | no connected runner, on probation or not, can ever hold the request        |
| RESOURCE_EXHAUSTED | tenant limit, deadline that can't be met, decision of the policy, full queue |

The checks run from definite to expensive. Only the last one, a full queue, may shed another request instead.
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
    """Decides on a request from what runs and waits. It may shed waiting requests of other tenants to make room."""

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
        """Returns why the request is refused, or None if it may wait. `known`: another request with the same id."""
        refusal = self._unfit(request, known) or self._over_limit(request) or self.early.refusal(request)
        if refusal is None and request.grammar and self._constraints.is_crowded(request.tenant):
            message = "too many constraints are waiting to be compiled: try again later"
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
                "the service is shutting down: send the request to another one",
                "",
                1.0,
                RefusalReason.DRAINING,
            )
        if self._pool.model is None:
            return EngineRefusal(
                grpc.StatusCode.UNAVAILABLE, "no runner has joined yet: try again", "", 1.0, RefusalReason.NO_RUNNER
            )
        most, needed = self._pool.max_tokens, request.limit
        # A request that began on a lost runner is exempt: it waits for a runner that can hold it.
        if self._pool.schedulers and needed > most and not request.num_received:
            message = (
                f"prompt and max_tokens ({needed} tokens) can never fit a connected runner: "
                f"the largest holds {most} tokens per sequence; lower max_tokens"
            )
            return EngineRefusal(
                grpc.StatusCode.INVALID_ARGUMENT, message, "stop.max_tokens", reason=RefusalReason.TOO_LONG
            )
        return None

    def _over_limit(self, request: Request) -> EngineRefusal | None:
        excess = self._requests.shares.excess(request)
        if not excess:
            return None
        # The tenant's sequences take turns with those of other tenants.
        turns = len(self._requests.queue) / max(1, self._requests.shares.waiting(request.tenant))
        message = f"tenant {request.tenant!r} is at its limit ({excess}): try again later"
        retry_s = self.early.retry_s(self._requests.shares.surplus(request) * turns)
        return EngineRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, "", retry_s, RefusalReason.TENANT_LIMIT)

    def _make_room(self, request: Request) -> EngineRefusal | None:
        """Refuses the request if the queue is full, unless a tenant with a larger share of it can be shed."""
        settings = self._settings
        queue, sequences = self._requests.queue, len(request.sequences)
        too_many = len(queue) + sequences - settings.max_waiting_requests
        too_many_tokens = queue.num_tokens + request.prompt_len * sequences - settings.max_waiting_tokens
        if too_many <= 0 and too_many_tokens <= 0:
            return None
        shed = self._requests.shares.to_shed(request, too_many, too_many_tokens)
        if shed is None:
            bound = f"{len(queue)} sequences with {queue.num_tokens} tokens are waiting"
            message = f"the queue is full ({bound}): try again later"
            retry_s = self.early.retry_s(self._leaving(too_many, too_many_tokens))
            return EngineRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, "", retry_s, RefusalReason.QUEUE_FULL)
        message = "the queue is full, and tenant {!r} has the largest share of it: try again later"
        for other in shed:
            retry_s = self.early.retry_s(self._leaving(too_many, too_many_tokens))
            refusal = EngineRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message.format(other.tenant), "", retry_s)
            self._shed(other, refusal)
        return None

    def _shed(self, request: Request, refusal: EngineRefusal) -> None:
        """Cancels a waiting request and sends the refusal to its client."""
        self._requests.totals.refuse(RefusalReason.SHED)
        self._requests.outbox.message(request.owner, refusal.to_message(request.handle))
        request.is_left = True
        self._requests.finish_request(request, End(FinishReason.CANCELLED, message=refusal.message))

    def _leaving(self, sequences: int, tokens: int) -> float:
        """Returns how many sequences must leave the queue to free at least that many entries and tokens."""
        queue = self._requests.queue
        return max(sequences, tokens * len(queue) / max(1, queue.num_tokens))

    def _load(self) -> Load:
        """Returns the load summed over all runners."""
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
            tokens_per_row=max((load.tokens_per_row for load in loads), default=1.0),
            drafts_per_row=max((load.drafts_per_row for load in loads), default=0.0),
            queue_runners=max(1, len(loads)),
            step_times=self._requests.ledger.step_times,
        )
