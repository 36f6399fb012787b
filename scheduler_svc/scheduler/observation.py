"""From an applied result to the report that policies learn from."""

from __future__ import annotations

import numpy as np

from roster_protos import plan_pb2
from scheduler_svc.plan.applied_result import AppliedResult
from scheduler_svc.policy import Ended, FirstToken, StepReport
from scheduler_svc.scheduler.policy_views import request_view, tile_tokens

_TRUE = b"\1"


def observation(hello: plan_pb2.Hello, applied: AppliedResult, now_s: float, ended: list[Ended]) -> StepReport:
    """What the result, here at `now_s`, tells of its step; `ended` since the report before. The runner said `hello`."""
    flight, gaps_s, num_decode = applied.flight, applied.gaps_s, applied.flight.num_decode
    first_tokens = []
    is_first = np.isnan(gaps_s)
    if _TRUE in is_first.tobytes():
        for index in is_first.nonzero()[0].tolist():
            request = flight.sequences[applied.rows[index]].request
            first_tokens.append(FirstToken(request_view(request), now_s - request.arrival_s))
        gaps_s = gaps_s[~is_first]
    return StepReport(
        now_s=now_s,
        rows=len(flight.flags),
        sampled=len(applied.tokens),
        round_trip_s=now_s - flight.sent_s,
        step_s=applied.step_s,
        decode_rows=num_decode,
        prefill_tokens=flight.positions - num_decode,
        context=int(np.add.reduce(flight.starts[:num_decode])),
        tile_tokens=tile_tokens(hello),
        gaps_s=gaps_s,
        first_tokens=tuple(first_tokens),
        ended=tuple(ended),
    )
