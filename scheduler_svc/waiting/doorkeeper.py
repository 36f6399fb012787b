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
from itertools import islice
from typing import TYPE_CHECKING

import grpc
import numpy as np

from scheduler_svc.intake import EngineRefusal
from scheduler_svc.policy import Load, Refuse
from scheduler_svc.refusal_reason import RefusalReason
from scheduler_svc.request_view import request_view
from scheduler_svc.sequence import End, FinishReason, Request

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine

RANKS_SAMPLED = 256
"""Sequences whose rank is compared to tell how many go first."""

SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.5, 60.0


class Doorkeeper:
    """Judges requests on the engine's state. `shed` says what an accepted request costs others."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def refusal(self, request: Request, known: Request | None) -> EngineRefusal | None:
        """Why this request can't wait here; None if it can. `known`: another request of its id."""
        refusal = self._unfit(request, known) or self._over_limit(request) or self._late(request)
        if refusal is not None:
            return refusal
        if self._engine.policy.admits:
            answer = self._engine.policy.admit(request_view(request), self._load())
            if isinstance(answer, Refuse):
                return EngineRefusal(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, answer.reason, "", answer.retry_after_s, RefusalReason.POLICY
                )
        return self._make_room(request)

    def _unfit(self, request: Request, known: Request | None) -> EngineRefusal | None:
        engine = self._engine
        if known is not None:
            message = f"request_id {request.request_id!r} is in use with another body: choose another id"
            return EngineRefusal(grpc.StatusCode.ALREADY_EXISTS, message, "request_id", reason=RefusalReason.ID_IN_USE)
        if engine.drain.begun:
            return EngineRefusal(
                grpc.StatusCode.UNAVAILABLE,
                "the service is shutting down: use another one",
                "",
                1.0,
                RefusalReason.DRAINING,
            )
        if engine.pool.model is None:
            return EngineRefusal(
                grpc.StatusCode.UNAVAILABLE, "no runner is there yet: try again", "", 1.0, RefusalReason.NO_RUNNER
            )
        most, needed = engine.pool.max_tokens, request.limit
        if engine.pool.schedulers and needed > most:
            message = (
                f"prompt and max_tokens ({needed} tokens) can never fit a runner that is there: the largest holds "
                f"{most} tokens of one sequence; lower max_tokens"
            )
            return EngineRefusal(
                grpc.StatusCode.INVALID_ARGUMENT, message, "stop.max_tokens", reason=RefusalReason.TOO_LONG
            )
        return None

    def _over_limit(self, request: Request) -> EngineRefusal | None:
        excess = self._engine.shares.excess(request)
        if not excess:
            return None
        waiting = self._engine.shares.waiting(request.tenant)
        message = f"tenant {request.tenant!r} is at its limit ({excess}): try again later"
        return EngineRefusal(
            grpc.StatusCode.RESOURCE_EXHAUSTED, message, "", self._retry_s(waiting // 8 + 1), RefusalReason.TENANT_LIMIT
        )

    def _late(self, request: Request) -> EngineRefusal | None:
        """Its deadline would pass before it is served: better told now than then."""
        engine, rate = self._engine, self._engine.rate
        if request.deadline_s is None or not engine.settings.early_refusal or not len(engine.queue) or not rate.known:
            return None
        if engine.placement.takes_now(request.sequences[0]):  # who waits, waits for larger runners
            return None
        running = sum(scheduler.table.num_running for scheduler in engine.pool.schedulers.values())
        tokens = request.max_tokens - request.num_received
        needed_s = rate.wait_s(self._ahead(request)) + rate.service_s(tokens, running)
        late_s = needed_s - (request.deadline_s - engine.ledger.now_s)
        if late_s <= 0:
            return None
        message = f"it would take about {needed_s:.1f} s at the present load, longer than its deadline: try again later"
        return EngineRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, "", _bounded(late_s), RefusalReason.DEADLINE)

    def _ahead(self, request: Request) -> int:
        """About how many sequences go first: by a sample of their ranks, or by turns where tenants take them."""
        engine = self._engine
        waiting = len(engine.queue)
        if engine.policy.orders_tenants:
            return min(waiting, (engine.shares.waiting(request.tenant) + 1) * engine.shares.num_tenants)
        key = engine.policy.key(request_view(request), engine.ledger)
        stride = waiting // RANKS_SAMPLED + 1
        return stride * sum(sequence.rank.key <= key for sequence in islice(engine.queue, 0, None, stride))

    def _make_room(self, request: Request) -> EngineRefusal | None:
        """Refuses when the queue is full, unless a tenant that has more of it gives way."""
        engine, settings = self._engine, self._engine.settings
        queue, sequences = engine.queue, len(request.sequences)
        too_many = len(queue) + sequences - settings.max_waiting_requests
        too_many_tokens = queue.num_tokens + request.prompt_len * sequences - settings.max_waiting_tokens
        if too_many <= 0 and too_many_tokens <= 0:
            return None
        shed = engine.shares.to_shed(request, too_many, too_many_tokens)
        if shed is None:
            bound = f"{len(queue)} sequences with {queue.num_tokens} tokens wait"
            message = f"the queue is full ({bound}): try again later"
            retry_s = self._retry_s(len(queue) // 8)
            return EngineRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, "", retry_s, RefusalReason.QUEUE_FULL)
        message = "the queue is full, and tenant {!r} has the greatest part of it: try again later"
        for other in shed:
            refusal = EngineRefusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED, message.format(other.tenant), "", self._retry_s(len(queue) // 8)
            )
            self._shed(other, refusal)
        return None

    def _shed(self, request: Request, refusal: EngineRefusal) -> None:
        """Takes back a request that waits; its client hears the refusal."""
        engine = self._engine
        engine.totals.refuse(RefusalReason.SHED)
        engine.outbox.message(request.owner, refusal.to_message(request.handle))
        request.is_left = True
        engine.finish_request(request, End(FinishReason.CANCELLED, message=refusal.message))

    def _retry_s(self, ended: int) -> float:
        """Seconds until about so many sequences have ended, at the pace so far."""
        engine = self._engine
        if engine.rate.known:
            return _bounded(engine.rate.wait_s(ended))
        pace = engine.totals.finished / max(1e-3, engine.clock() - engine.started_s)
        return _bounded(ended / max(pace, 1e-3))

    def _load(self) -> Load:
        """The sum over all runners."""
        engine = self._engine
        loads = [s.load(engine.queue, np.flatnonzero(s.table.lag == 1)) for s in engine.pool.schedulers.values()]
        return Load(
            running=sum(load.running for load in loads),
            decoding=sum(load.decoding for load in loads),
            slots=sum(load.slots for load in loads),
            waiting=len(engine.queue),
            waiting_tokens=engine.queue.num_tokens,
            free_blocks=sum(load.free_blocks for load in loads),
            blocks=sum(load.blocks for load in loads),
            block_size=max((load.block_size for load in loads), default=1),
            max_step_tokens=sum(load.max_step_tokens for load in loads),
            now_s=engine.ledger.now_s,
            context=sum(load.context for load in loads),
            prompt_backlog=sum(load.prompt_backlog for load in loads),
            itl_target_s=min((load.itl_target_s for load in loads), default=math.inf),
            tile_tokens=max((load.tile_tokens for load in loads), default=1),
            runners=len(loads),
        )


def _bounded(seconds: float) -> float:
    return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, seconds))
