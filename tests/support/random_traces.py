"""Small random traces for the simulator, with many coincidences."""

from __future__ import annotations

import random

from scheduler_svc.simulator.trace import Trace, TraceRequest


def random_trace(seed: int, count: int = 40, *, stops: bool = True) -> Trace:
    """Returns single requests and bursts of two tenants and two priorities, some with targets.

    With `stops`, some have a stop token before their `max_tokens`.
    """
    rng = random.Random(seed)
    arrivals = sorted(rng.choice([rng.uniform(0, 8), rng.randrange(8)]) for _ in range(count))
    requests = []
    for arrival_s in arrivals:
        output = rng.randint(1, 90)
        most = output + (rng.choice([0, 0, rng.randint(1, 50)]) if stops else 0)
        requests.append(
            TraceRequest(
                arrival_s,
                rng.randint(1, 300),
                output,
                tenant=rng.choice("ab"),
                priority=rng.randint(0, 1),
                ttft_target_ms=rng.choice([None, 3000]),
                itl_target_ms=rng.choice([None, 50]),
                max_tokens=most,
            )
        )
    return Trace(f"random-{seed}", tuple(requests))
