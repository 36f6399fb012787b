"""Results that say that nothing came of a step: the runner's doing, as far as anybody can tell.

One sequence whose logits are not finite is a fault of its own, and ends with an error. Where those of every sequence
are, of requests that have nothing to do with each other, the runner is ill: its session ends, and they go on elsewhere.
A request that was alone in its step gets a second opinion, where there is another runner.
"""

from __future__ import annotations

import numpy as np

from roster_protos import plan_pb2
from scheduler_svc.link.runner_events import GotResult
from scheduler_svc.scheduler.scheduler import Scheduler

NOT_FINITE = plan_pb2.ROW_STATUS_NOT_FINITE


def is_worthless(event: GotResult, scheduler: Scheduler, num_runners: int) -> bool:
    """Is the runner, one of so many, to blame for this result, which has rows that are not finite?"""
    flight = scheduler.in_flight[0] if scheduler.in_flight else None
    if flight is None or flight.number != event.number or len(event.result.statuses) != len(flight.flags):
        return False
    statuses = np.frombuffer(event.result.statuses, np.uint8)
    if not (statuses[flight.sample] == NOT_FINITE).all():
        return False
    requests = {id(sequence.request): sequence.request for sequence in flight.sequences[flight.sample]}
    if len(requests) > 1:
        return True
    return num_runners > 1 and not any(request.suspicion.strikes for request in requests.values())
