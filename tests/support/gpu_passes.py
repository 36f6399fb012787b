"""Forward passes of a decoder on a GPU without a backend: the logits of every position, compared as integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder, StepAttention
from runner_svc.decoder.step_rotations import StepRows
from runner_svc.interface.attention_launcher import AttentionLauncher, DecodeRows, PrefillRows, VerifyRows
from runner_svc.interface.device import Device, Replay
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.launchers import Launchers

MOST_LOGITS = 512
"""Positions whose logits exist at a time."""


@dataclass(frozen=True, slots=True)
class Part:
    """Positions of a slot that a pass computes."""

    slot: int
    start: int
    count: int

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.count


class Passes:
    """A decoder, its cache and slots of random tokens, each with blocks of its own anywhere in the cache."""

    def __init__(
        self,
        decoder: CudaDecoder,
        launchers: Launchers,
        device: Device,
        *,
        num_slots: int,
        context: int,
        cache_dtype: torch.dtype,
        seed: int,
        block_size: int = 16,
    ) -> None:
        """`context`: positions of each slot, a multiple of the block size."""
        self._decoder, self._device, self._context = decoder, device, context
        self._fusions = decoder.fusions[0]
        self._graph: Replay | None = None
        random = torch.Generator().manual_seed(seed)
        blocks = num_slots * context // block_size
        where = decoder.device
        self.cache = KVCache(decoder.config, blocks, block_size, cache_dtype, where)
        self._forget(slice(None))
        order = 1 + torch.randperm(blocks, generator=random, dtype=torch.int32)
        self.tables = order.view(num_slots, -1).to(where)
        self._own = self.tables.clone()
        vocab = decoder.config.vocab_size
        self.tokens = torch.randint(vocab, (num_slots, context), generator=random, dtype=torch.int32).to(where)
        with device.stream():
            self.attention: AttentionLauncher = launchers.attention(
                self.cache, self.tables, num_slots, decoder.config.attention_layers
            )

    def share(self, slot: int, other: int, positions: int) -> None:
        """Gives `slot` the tokens of `other`, and its blocks of the first `positions`."""
        self.tokens[slot] = self.tokens[other]
        count = positions // self.cache.block_size
        self.tables[slot] = self._own[slot]
        self.tables[slot, :count] = self.tables[other, :count]

    def renew(self, slot: int, spare: int) -> None:
        """Gives `slot` the blocks of `spare`, which gets its own; what either had cached is gone."""
        self._own[[slot, spare]] = self._own[[spare, slot]]
        self.tables[[slot, spare]] = self._own[[slot, spare]]
        self._forget(self.tables[[slot, spare]].flatten().long())

    def _forget(self, blocks: Tensor | slice) -> None:
        bytes_of = self.cache.data.view(torch.uint8)
        bytes_of[:, :, blocks] = 0x7F if self.cache.data.itemsize == 1 else 0xFF  # NaN

    def mixed(self, parts: Sequence[Part], *, padded: int = 0, captured: bool = False) -> list[Tensor]:
        """Computes a pass in which parts of one position decode; returns each part's logits, float32 [count, vocab].

        `padded`: further positions, all of the dummy block.
        """
        firsts = np.cumsum([0, *(part.count for part in parts)], dtype=np.int32)[:-1]
        one = np.array([part.count == 1 for part in parts])
        starts, counts, slots = (
            np.array([getattr(part, name) for part in parts], np.int32) for name in ("start", "count", "slot")
        )
        decode = DecodeRows(starts[one] + 1, slots[one], firsts[one])
        prefill = PrefillRows(starts[~one], counts[~one], slots[~one], firsts[~one])
        batch, chunks = int(one.sum()), int((~one).sum())
        words = self.attention.prefill_plan_words(int(counts[~one].sum()), chunks) if chunks else 0
        plan = np.zeros(self.attention.mixed_plan_words(batch, words), np.int32)
        self.attention.plan_mixed(decode, prefill, plan, batch, words)

        def attend(stream: int, layer: int, queries: Tensor, output: Tensor, plan: int) -> None:
            self.attention.run_mixed(stream, layer, queries, output, plan, batch, words)

        return self._run(parts, plan, attend, padded, captured)

    def decode(self, parts: Sequence[Part], *, bucket: int | None = None, captured: bool = False) -> list[Tensor]:
        """Computes a decode pass of parts of one position, padded to `bucket` rows."""
        batch = bucket or len(parts)
        plan = np.zeros(self.attention.decode_plan_words(batch), np.int32)
        lengths, slots = (np.array(values, np.int32) for values in zip(*((p.end, p.slot) for p in parts), strict=True))
        self.attention.plan_decode(lengths, slots, plan, batch=batch)

        def attend(stream: int, layer: int, queries: Tensor, output: Tensor, plan: int) -> None:
            self.attention.run_decode(stream, layer, queries, output, plan, batch)

        return self._run(parts, plan, attend, batch - len(parts), captured)

    def verify(self, parts: Sequence[Part], *, captured: bool = False) -> list[Tensor]:
        """Computes a verifying pass of parts of the same number of positions, which the device's counters place."""
        stride, batch = parts[0].count, len(parts)
        plan = np.zeros(self.attention.verify_plan_words(batch, stride), np.int32)
        known, slots = (np.array(v, np.int32) for v in zip(*((p.start + 1, p.slot) for p in parts), strict=True))
        queries_of = np.arange(batch, dtype=np.int32) * stride
        uppers = np.minimum(known + 3, self._context - stride)
        rows = VerifyRows(np.maximum(known - 2, 1), np.maximum(uppers, known), slots, queries_of)
        self.attention.plan_verify(rows, plan, batch, stride)
        counters = torch.ones(len(self.tables) + 1, dtype=torch.int32)
        counters[slots.astype(np.int64)] = torch.from_numpy(known)
        counters = counters.to(self._decoder.device)
        drafted = torch.full((batch,), stride - 1, dtype=torch.int32, device=self._decoder.device)

        def attend(stream: int, layer: int, queries: Tensor, output: Tensor, plan: int) -> None:
            self.attention.run_verify(stream, layer, queries, output, plan, batch, stride, counters, drafted)

        return self._run(parts, plan, attend, 0, captured)

    @torch.inference_mode()
    def _run(
        self,
        parts: Sequence[Part],
        plan: np.ndarray,
        attend: Callable[[int, int, Tensor, Tensor, int], None],
        padded: int,
        captured: bool,
    ) -> list[Tensor]:
        device, where, size = self._device, self._decoder.device, self.cache.block_size
        with device.stream():
            positions = torch.cat([torch.arange(part.start, part.end) for part in parts]).to(where)
            rows = torch.cat([torch.full((part.count,), part.slot) for part in parts]).to(where)
            slot_mapping = self.tables[rows, positions // size] * size + positions % size
            tokens, positions, slot_mapping = (
                torch.nn.functional.pad(each.int(), (0, padded)).contiguous()
                for each in (self.tokens[rows, positions], positions, slot_mapping)
            )
            total = len(tokens)
            offsets = torch.arange(total + 1, dtype=torch.int32, device=where)
            lengths = torch.ones(total, dtype=torch.int32, device=where)
            words = torch.zeros(-(-len(plan) // 8) * 8 + 8, dtype=torch.int32)
            words[: len(plan)] = torch.from_numpy(plan)
            on_device = words.to(where)
            logits = [
                torch.full((min(MOST_LOGITS, total - begin), self._decoder.config.vocab_size), torch.nan, device=where)
                for begin in range(0, total, MOST_LOGITS)
            ]

            def planned(stream: int, layer: int, queries: Tensor, output: Tensor) -> None:
                attend(stream, layer, queries, output, on_device.data_ptr())

            attention: StepAttention = planned

            def launch() -> None:
                now = device.current_stream()
                step = self._decoder.inputs(tokens, positions, slot_mapping, StepRows(offsets, lengths))
                hidden = self._decoder.forward(now, step, self.cache, attention, self._fusions)
                for index, out in enumerate(logits):
                    begin = index * MOST_LOGITS
                    self._decoder.logits(now, hidden.slice(begin, begin + len(out)), out)

            if captured:
                replay = device.capture(launch)
                self._graph = replay  # without one that is kept, the device's pool of graphs would end
                for out in logits:
                    out.fill_(torch.nan)
                replay()
            else:
                launch()
        device.synchronize()
        whole = torch.cat(logits)[: total - padded]
        return list(whole.split([part.count for part in parts]))


def different(one: Tensor, other: Tensor) -> int:
    """Returns how many positions have unequal bits in logits [positions, vocab_size]; all that are not finite do."""
    unequal = (one.contiguous().view(torch.int32) != other.contiguous().view(torch.int32)).any(dim=-1)
    return int((unequal | ~one.isfinite().all(dim=-1)).sum())
