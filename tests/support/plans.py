"""Handwritten plans for tests of the runner: keyword arguments in, protobuf out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from roster_protos import plan_pb2

SAMPLE = 1
AWAIT = 3
"""Samples once the row's mask has arrived."""


def int32s(values: Iterable[int]) -> bytes:
    """Packs a little-endian int32 column."""
    return np.array(list(values), "<i4").tobytes()


def ints(column: bytes) -> list[int]:
    """Unpacks a little-endian int32 column."""
    return np.frombuffer(column, "<i4").tolist()


def sampling(**fields: Any) -> plan_pb2.Sampling:
    """Returns greedy sampling without adjustments, except `fields`; id columns may be given as lists."""
    defaults: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}
    for name in ("bias_ids", "stop_ids"):
        if name in fields:
            fields[name] = int32s(fields[name])
    if "bias_values" in fields:
        fields["bias_values"] = np.array(fields["bias_values"], "<f4").tobytes()
    return plan_pb2.Sampling(**(defaults | fields))


def admission(slot: int, tokens: Sequence[int], blocks: Sequence[int], **fields: Any) -> plan_pb2.Admission:
    """Returns an admission whose tokens are all prompt, with sequence id 100 + slot, except `fields`."""
    defaults: dict[str, Any] = {"sequence_id": 100 + slot, "prompt_len": len(tokens), "sampling": sampling()}
    return plan_pb2.Admission(slot=slot, tokens=int32s(tokens), blocks=int32s(blocks), **(defaults | fields))


def plan(
    *,
    releases: Sequence[int] = (),
    admissions: Sequence[plan_pb2.Admission] = (),
    appends: Sequence[tuple[int, int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
    extents: Sequence[tuple[int, int, int, int]] = (),
    drafts: Sequence[int] = (),
    forced: Sequence[Sequence[int]] = (),
    offloads: Sequence[Sequence[tuple[int, int, bytes]]] = (),
    loads: Sequence[Sequence[tuple[int, int]]] = (),
    purged: Sequence[int] = (),
) -> plan_pb2.Plan:
    """`appends` are (slot, index, block), `copies` (source, target), `extents` (slot, start, count, flags).

    `drafts`: the number of each row, or nothing; `forced`: the tokens that each row appends, or nothing. `offloads` are
    tickets of (block, host block, tag), `loads` tickets of (host block, block), `purged` host blocks.
    """
    offloaded = [copied for ticket in offloads for copied in ticket]
    loaded = [copied for ticket in loads for copied in ticket]
    return plan_pb2.Plan(
        releases=int32s(releases),
        admissions=admissions,
        append_slots=int32s(slot for slot, _, _ in appends),
        append_indexes=int32s(index for _, index, _ in appends),
        append_blocks=int32s(block for _, _, block in appends),
        copy_sources=int32s(source for source, _ in copies),
        copy_targets=int32s(target for _, target in copies),
        extent_slots=int32s(slot for slot, _, _, _ in extents),
        extent_starts=int32s(start for _, start, _, _ in extents),
        extent_counts=int32s(count for _, _, count, _ in extents),
        extent_flags=bytes(flags for _, _, _, flags in extents),
        extent_drafts=bytes(drafts),
        extent_forced=bytes(map(len, forced)),
        forced_tokens=int32s(token for tokens in forced for token in tokens),
        offload_sources=int32s(source for source, _, _ in offloaded),
        offload_targets=int32s(target for _, target, _ in offloaded),
        offload_counts=int32s(map(len, offloads)),
        offload_tags=b"".join(tag for _, _, tag in offloaded),
        load_sources=int32s(source for source, _ in loaded),
        load_targets=int32s(target for _, target in loaded),
        load_counts=int32s(map(len, loads)),
        purged_host_blocks=int32s(purged),
    )


def masks(vocab_size: int, allowed: Mapping[int, Iterable[int]]) -> plan_pb2.Masks:
    """`allowed`: the ids that each row of the plan may draw."""
    message = plan_pb2.Masks()
    for row, ids in allowed.items():
        bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
        bits[list(ids)] = True
        message.rows.add(row=row, bits=np.packbits(bits, bitorder="little").tobytes())
    return message
