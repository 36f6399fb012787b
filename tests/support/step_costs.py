"""Steps that a runner measures at start, with times from a function."""

from __future__ import annotations

from collections.abc import Callable

from roster_protos import plan_pb2

Rows = list[tuple[int, int]]


def costs_of(seconds_of: Callable[[Rows, Rows], float]) -> list[plan_pb2.StepCost]:
    """Returns steps of all kinds; `seconds_of` gets the (start, count) of the decoding rows and of the chunks."""
    cases = [(1, 256, 0, 0), (8, 256, 0, 0), (64, 256, 0, 0), (64, 1024, 0, 0), (256, 256, 0, 0), (0, 0, 64, 0)]
    cases += [(0, 0, 256, 0), (0, 0, 1024, 0), (0, 0, 4096, 0), (32, 1024, 480, 0), (64, 1024, 960, 0)]
    cases += [(0, 0, 512, 4096)]
    costs = []
    for rows, context, count, start in cases:
        seconds = seconds_of([(context, 1)] * rows, [(start, count)] if count else [])
        costs.append(
            plan_pb2.StepCost(
                decode_rows=rows,
                context=rows * context,
                prompt_positions=count,
                prompt_start=start,
                step_ns=round(seconds * 1e9),
            )
        )
    return costs
