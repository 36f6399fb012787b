"""The kernels that draft and accept tokens, in plain Python: the launchers of `host_device`, and their definition."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from roster_protos import plan_pb2
from runner_svc.drafting.drafter import Drafter
from runner_svc.drafting.ngram import LONGEST, WINDOW, NgramDrafter
from runner_svc.interface.draft_launchers import DraftLaunchers, DraftRows
from runner_svc.sampling.sample_records import SAMPLE_RECORD


def host_drafts(
    tokens: Tensor,
    counters: Tensor,
    tables: Tensor,
    block_size: int,
    vocab_size: int,
    longest: int = LONGEST,
    window: int = WINDOW,
) -> DraftLaunchers:
    """Returns the launchers over a token buffer, its counters and block tables."""
    return DraftLaunchers(
        ngram=HostDrafter(NgramDrafter(longest, window), tokens, counters),
        place=HostPlace(tokens, counters, vocab_size),
        gather=HostDraftedGather(tokens, tables, block_size),
        expand=host_expand,
        accept=HostAccept(tokens, counters),
    )


class HostDrafter:
    """A drafter of the CPU's backends as the launcher of one."""

    def __init__(self, drafter: Drafter, tokens: Tensor, counters: Tensor) -> None:
        self._drafter, self._tokens, self._counters = drafter, tokens, counters

    def __call__(self, stream: int, rows: DraftRows, proposals: Tensor) -> None:
        slots, most = rows.slots.numpy(), np.where(rows.starts.numpy() < 0, rows.counts.numpy() - 1, 0)
        counters = self._counters.numpy()[slots].clip(0, self._tokens.shape[1])
        most = most.clip(0, proposals.shape[1]).astype(np.int32)
        own = self._drafter.propose(self._tokens.numpy(), slots, counters, most)[:, : proposals.shape[1]]
        proposals.fill_(-1)
        proposals[:, : own.shape[1]] = torch.from_numpy(own)


class HostPlace:
    def __init__(self, tokens: Tensor, counters: Tensor, vocab_size: int) -> None:
        self._tokens, self._counters, self._vocab_size = tokens, counters, vocab_size

    def __call__(self, stream: int, rows: DraftRows, proposals: Tensor | None) -> None:
        columns = _lists(rows.slots, rows.starts, rows.counts, rows.limits)
        for row, (slot, start, count, limit) in enumerate(zip(*columns, strict=True)):
            drafts: list[int] = []
            if start < 0:
                known, limit = int(self._counters[slot]), min(limit, self._tokens.shape[1] - 1)
                fits = count > 0 and 1 <= known <= limit
                if fits and proposals is not None:
                    drafts = self._usable(proposals[row].tolist())[: max(0, min(count - 1, limit - known))]
                start, count = (known - 1, 1 + len(drafts)) if fits else (0, 0)
                if drafts:
                    self._tokens[slot, known : known + len(drafts)] = self._tokens.new_tensor(drafts)
            rows.firsts[row], rows.present[row], rows.drafted[row] = start, count, len(drafts)

    def _usable(self, ids: list[int]) -> list[int]:
        bad = [index for index, token in enumerate(ids) if not 0 <= token < self._vocab_size]
        return ids[: bad[0]] if bad else ids


class HostDraftedGather:
    def __init__(self, tokens: Tensor, tables: Tensor, block_size: int) -> None:
        self._tokens, self._tables, self._block_size = tokens, tables, block_size

    def __call__(self, stream: int, rows: DraftRows, tokens: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        for inputs in (tokens, positions, slot_mapping):
            inputs.zero_()
        columns = _lists(rows.slots, rows.firsts, rows.present, rows.offsets[:-1], rows.offsets[1:])
        for slot, first, present, begin, end in zip(*columns, strict=True):
            for place in range(min(present, end - begin)):
                position = first + place
                block = int(self._tables[slot, position // self._block_size])
                tokens[begin + place] = self._tokens[slot, position]
                positions[begin + place] = position
                slot_mapping[begin + place] = block * self._block_size + position % self._block_size


def host_expand(stream: int, records: Tensor, sampled: Tensor, rows: DraftRows, expanded: Tensor, stride: int) -> None:
    packed = records.numpy().view(SAMPLE_RECORD)
    out = expanded.numpy()[: len(sampled) * stride * SAMPLE_RECORD.itemsize // 4].view(SAMPLE_RECORD)
    for draw in range(len(sampled) * stride):
        record, row, place = packed[draw // stride].copy(), int(sampled[draw // stride]), draw % stride
        has_start = record["position"] >= 0
        if place or not has_start:
            is_here = not has_start and place < int(rows.present[row])
            record["position"] = int(rows.firsts[row]) + place + 1 if is_here else 0
            if not is_here:
                record["temperature"], record["adjusted"] = 0, 0
        out[draw] = record


class HostAccept:
    def __init__(self, tokens: Tensor, counters: Tensor) -> None:
        self._tokens, self._counters = tokens, counters

    def __call__(
        self, stream: int, records: Tensor, draws: Tensor, finite: Tensor, outcomes: Tensor, stride: int
    ) -> None:
        packed = records.numpy().view(SAMPLE_RECORD)[: len(outcomes) * stride].reshape(-1, stride)
        for row, own in enumerate(packed):
            positions, slot = own["position"].tolist(), int(own["slot"][0])
            present = list(itertools.takewhile(lambda position: position > 0, positions))
            drafts = self._tokens[slot, present[:-1]].tolist()
            kept: list[int] = []
            for index in range(len(present)):
                if not finite[row * stride + index]:
                    break
                kept.append(int(draws[row * stride + index]))
                if index < len(drafts) and kept[-1] != drafts[index]:
                    break
            status = plan_pb2.ROW_STATUS_NOT_FINITE if present else plan_pb2.ROW_STATUS_FAILED
            outcomes[row] = len(kept) | max(0, len(present) - 1) << 8 | (0 if kept else status) << 16
            if kept and not own["reserved"][0]:
                self._tokens[slot, present[0] : present[0] + len(kept)] = self._tokens.new_tensor(kept)
                self._counters[slot] = present[0] + len(kept)


def _lists(*columns: Tensor) -> list[list[int]]:
    return [np.asarray(column).tolist() for column in columns]
