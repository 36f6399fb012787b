"""The open-loop client: sends every request at its time, regardless of answers, and measures its own delays."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from roster_client.bench.load.target import Answer, RequestFailed, Target
from roster_client.bench.load.workload import LoadRequest
from roster_client.bench.records.record import LoopDelays, RequestRecord, Status

LEAD_S = 0.2
"""Time from the call to the run's start, so that the first requests are not late."""
TICK_S = 0.01


class LoadRun:
    """One run of requests against a target; `records` has each request that has ended, even if the run is cut short."""

    def __init__(
        self,
        target: Target[Any],
        requests: Sequence[LoadRequest],
        timeout_s: float | None = None,
        end_s: float | None = None,
    ) -> None:
        """`timeout_s`: seconds after sending when a request is abandoned; None: never.

        `end_s`: seconds after the run's start when all unfinished requests are abandoned and no more are sent.
        """
        self._target = target
        self._requests = sorted(requests, key=lambda request: request.scheduled_s)
        self._timeout_s = timeout_s
        self._end_s = end_s
        self._start_s = 0.0
        self.total = len(requests)
        self.sent = 0
        self.tokens = 0
        self.records: list[RequestRecord] = []
        self.loop_delays: LoopDelays | None = None
        self.counts_spread = False
        """Whether some request's tokens were not counted per message, but spread evenly."""

    @property
    def now_s(self) -> float:
        """Seconds since the run's start, negative before it."""
        return time.monotonic() - self._start_s

    async def run(self, beside: Callable[[], Any] | None = None) -> None:
        """Sends all requests and waits until they have ended. `beside`: a coroutine function to run concurrently."""
        was_frozen = gc.get_freeze_count() > 0  # by the caller: it stays so
        gc.collect()
        gc.freeze()  # prompts are many objects, which no collection should scan during the run
        self._start_s = time.monotonic() + LEAD_S
        watch = asyncio.create_task(self._watch_loop())
        other = asyncio.create_task(beside()) if beside else None
        try:
            async with asyncio.TaskGroup() as group:
                for request in self._requests:
                    if self._end_s is not None and request.scheduled_s >= self._end_s:
                        break
                    prepared = self._target.prepare(request)
                    await asyncio.sleep(max(0.0, request.scheduled_s - self.now_s))
                    group.create_task(self._serve(request, prepared))
        finally:
            for task in filter(None, (watch, other)):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            if not was_frozen:
                gc.unfreeze()

    async def _serve(self, request: LoadRequest, prepared: Any) -> None:
        times_s: list[float] = []
        counts: list[int] = []
        start_s = self._start_s

        def take(tokens: int) -> None:
            times_s.append(time.monotonic() - start_s)
            counts.append(tokens)
            self.tokens += tokens

        sent_s = time.monotonic() - start_s
        self.sent += 1
        status, error, answer = Status.OK, "", Answer(request.prompt_tokens, 0)
        limit_s = self._limit_s(sent_s)
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._target.serve(prepared, take)
        except TimeoutError:
            status, error = Status.TIMEOUT, f"abandoned by the client after {limit_s:.3g} s"
        except RequestFailed as failure:
            status, error = failure.status, str(failure)
        output_tokens = answer.output_tokens if status is Status.OK else sum(counts)
        self.counts_spread |= bool(counts) and sum(counts) != output_tokens
        self.records.append(
            RequestRecord(
                request_id=request.request_id,
                scheduled_s=request.scheduled_s,
                sent_s=sent_s,
                status=status,
                wanted_tokens=request.output_tokens,
                prompt_tokens=answer.prompt_tokens,
                output_tokens=output_tokens,
                message_s=tuple(times_s),
                message_tokens=counted(counts, output_tokens),
                cached_tokens=answer.cached_tokens,
                drafted_tokens=answer.drafted_tokens,
                accepted_tokens=answer.accepted_tokens,
                tenant=request.tenant,
                ttft_target_s=request.ttft_target_s,
                itl_target_s=request.itl_target_s,
                error=error,
            )
        )

    def _limit_s(self, sent_s: float) -> float | None:
        """Returns the time limit, in seconds, of a request that is sent at `sent_s`."""
        limits = [] if self._timeout_s is None else [self._timeout_s]
        limits += [] if self._end_s is None else [max(0.0, self._end_s - sent_s)]
        return min(limits, default=None)

    async def _watch_loop(self) -> None:
        """Sleeps repeatedly and records how late it wakes."""
        delays_s: list[float] = []
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        try:
            while True:
                due_s = time.monotonic() + TICK_S
                await asyncio.sleep(TICK_S)
                delays_s.append(max(0.0, time.monotonic() - due_s))
        finally:
            cpu_share = (time.process_time() - begin_cpu_s) / max(1e-9, time.monotonic() - begin_s)
            p50_s, p99_s, max_s = np.percentile(delays_s or [0.0], (50, 99, 100)).tolist()
            self.loop_delays = LoopDelays(TICK_S, len(delays_s), p50_s, p99_s, max_s, cpu_share)


def counted(counts: Sequence[int], total: int) -> tuple[int, ...]:
    """Returns each message's tokens: as counted or, if their sum differs from `total`, `total` spread evenly."""
    if sum(counts) == total:
        return tuple(counts)
    bounds = [total * number // len(counts) for number in range(len(counts) + 1)] if counts else []
    return tuple(later - earlier for earlier, later in pairwise(bounds))
