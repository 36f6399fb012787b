"""Numbers of a part from what the client processes or a process of its own recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from bench.gpu_comparison.peers.load import Seen
from bench.gpu_comparison.peers.workloads import OBSERVED
from roster_client.bench.records.record import RequestRecord

PERCENTILES = (50, 90, 99)


def load_numbers(seen: Seen) -> dict[str, Any]:
    """Returns the numbers of a load: TTFT and E2E from the time at which a request was due, ITL between messages.

    Milliseconds, but for `seconds`, which last from the first due time to the last token.
    """
    requests = seen.requests
    seconds = max(one.last_token_s for one in requests) - min(one.scheduled_s for one in requests)
    tokens = sum(one.output_tokens for one in requests)
    messages = sum(len(one.message_s) for one in requests)
    return {
        "requests": len(requests),
        "prompt_tokens": sum(one.prompt_tokens for one in requests),
        "output_tokens": tokens,
        "cached_tokens": sum(one.cached_tokens or 0 for one in requests),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_message": tokens / messages,
        "ttft_ms": _percentiles([one.ttft_s for one in requests]),
        "itl_ms": _percentiles([gap for one in requests for gap in one.gaps_s]),
        "e2e_ms": _percentiles([one.e2e_s for one in requests]),
        "client_late_ms": _percentiles([one.lag_s for one in requests]),
        "client_loop_delay_p99_ms": seen.loop_delay_p99_s * 1e3,
        "client_cpu_share": seen.cpu_share,
    }


def step_ms(observed: RequestRecord, first: int, last: int) -> float:
    """Returns the mean time per token of a request between its output tokens `first` and `last`, in milliseconds.

    Messages with several tokens count as such. Raises ValueError if the tokens came in one message.
    """
    counts = list(accumulate(observed.message_tokens))
    begin, end = (next(index for index, count in enumerate(counts) if count >= token) for token in (first, last))
    if begin == end:
        raise ValueError("the observed tokens came in one message, so their steps can't be timed")
    return (observed.message_s[end] - observed.message_s[begin]) * 1e3 / (counts[end] - counts[begin])


def decode_numbers(requests: Sequence[RequestRecord], first: int, last: int) -> dict[str, float]:
    """Returns the milliseconds per step of a decode load, and those of the first and second half of the timed tokens.

    If the halves differ by much, rows joined or ended meanwhile. Raises ValueError if the other rows ended too soon.
    """
    *others, observed = sorted(requests, key=lambda one: one.request_id.endswith(OBSERVED))
    if any(one.last_token_s < observed.last_token_s for one in others):
        raise ValueError("the other rows ended before the observed one")
    middle = (first + last) // 2
    halves = (step_ms(observed, first, middle), step_ms(observed, middle, last))
    return {"step_ms": step_ms(observed, first, last), "first_half_ms": halves[0], "second_half_ms": halves[1]}


def bench_steps_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a results file of `bench.steps`, by rows."""
    rows = {str(row["batch"]): row for row in record["rows"]}
    return {
        "step_ms": {batch: row["step"] for batch, row in rows.items()},
        "floor_ms": {batch: row["floor"] for batch, row in rows.items()},
        "way": {batch: f"{row['bucket']}: {row['way']}" for batch, row in rows.items()},
    }


def padded_numbers(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Returns the numbers of padded batches. Raises ValueError if a request failed."""
    failed = [one for one in requests if not one.ok or not one.message_s]
    if failed:
        raise ValueError(f"{len(failed)} of {len(requests)} requests failed: {failed[0].error}")
    return load_numbers(Seen(list(requests), 0.0, 0.0))


def _percentiles(values_s: Sequence[float]) -> dict[str, float]:
    """Returns mean and percentiles in milliseconds, {} if there are no values."""
    if not values_s:
        return {}
    values_ms = np.array(values_s) * 1e3
    row = {"mean": float(values_ms.mean())}
    return row | {f"p{p}": float(np.percentile(values_ms, p)) for p in PERCENTILES}
