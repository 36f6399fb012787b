"""A backend for tests whose output depends on everything it reads: races and wrong blocks become wrong tokens.

The KV entry of a position is a running hash of all tokens up to it, `S[p] = S[p-1] + mix64(token[p]) * A^p mod 2^64`,
where `S[p-1]` is read through the block table: like real KV, it is correct only after the correct prefix. The hash that
picks the next token is the sum of `S[p] * B^p` over the whole context, read back through the block table. A block that
was never written contains garbage. Input tokens are read from the buffer that picked tokens are written to, as on a
device (`host_slots`). The KV of rejected drafts stays until the next run overwrites it. At temperature 0 the token
depends only on the context, otherwise on (seed, sample_index, position) too. `expected_tokens` is the reference
implementation: plain integers, no blocks, no batch.

With several ranks each keeps a share of every entry, whose sum is the entry: of `mix64(token)` a rank takes its own
bits (`HashShares`). All sums are linear, so one exchange of the rows' partial hashes gives the context's hash. A rank
that missed, repeated or reordered a plan adds the share of another context, and every rank then picks a wrong token.

Supported sampling parameters are temperature (zero or not), min_tokens with stop_ids, masks (the hash picks among the
allowed ids, all equally likely), and the logprobs fields, with the made-up numbers of `expected_logprobs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import NUM_TOKENS, byte_model
from runner_svc.backends.hash_shares import HashShares
from runner_svc.backends.hash_tokens import TokenPicker, expected_logprobs, only_logprobs, packed_logprobs
from runner_svc.backends.host_slots import HostSlots
from runner_svc.backends.poison import BrokenDevice, Poison
from runner_svc.drafting.drafter import Drafter
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.ranks import Communicator
from runner_svc.interface.step import MaskedDraw, StepBatch, StepOutput, allowed_ids, run_positions
from runner_svc.sampling.noise import MASK64, mix64, mix64_array

KV_BASE = 0xD1342543DE82EF95
_B = 0xAF251AF3B0F025B5


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return np.cumprod(np.concatenate(([np.uint64(1)], np.full(count - 1, base, np.uint64))), dtype=np.uint64)


class HashBackend:
    """`SlotBackend` that computes the hashes of the module. Each step takes at least `step_ms` milliseconds."""

    device = "hash"
    tile_tokens = 1

    def __init__(
        self,
        *,
        num_slots: int = 8,
        block_size: int = 16,
        num_blocks: int = 512,
        max_step_tokens: int = 512,
        vocab_size: int = NUM_TOKENS,
        context_length: int = 2048,
        eos_probability: float = 1 / 64,
        step_ms: float = 0.0,
        poison: Poison | None = None,
        drafter: Drafter | None = None,
        max_drafts: int = 0,
        ranks: Communicator | None = None,
    ) -> None:
        """`max_drafts`: most drafts of a row; 0 unless there is a `drafter`. `ranks`: None computes all alone."""
        self.shares = HashShares(ranks)
        self._poison = poison
        self.max_drafts = max_drafts if drafter is not None else 0
        self.drafter_name = drafter.name if drafter is not None else ""
        self.num_slots = num_slots
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_step_tokens = max_step_tokens
        self.model = byte_model("hash", "HashModel", vocab_size, context_length)
        self.eos_probability = eos_probability
        self._picker = TokenPicker(vocab_size, eos_probability)
        self._step_s = step_ms / 1000
        self._powers_a = _powers(KV_BASE, context_length)
        self._powers_b = _powers(_B, context_length + block_size)
        self._kv = np.empty((num_blocks + 1, block_size), np.uint64)
        self._forget_kv()
        self.host_slots = HostSlots(num_slots, context_length, block_size, drafter, vocab_size)

    def _forget_kv(self) -> None:
        garbage = np.random.default_rng(self.num_blocks)
        self._kv[:] = garbage.integers(0, 2**64, self._kv.shape, np.uint64)

    def regroup(self) -> None:
        """As `Regrouping.regroup`."""
        self._forget_kv()
        self.host_slots.forget(self.num_blocks)

    def draft_with(self, drafter: Drafter, max_drafts: int) -> None:
        """Sets the drafter, before the first step; `max_drafts`: most drafts of a row."""
        self.max_drafts, self.drafter_name = max_drafts, drafter.name
        self.host_slots.draft_with(drafter)

    def change_slots(self, changes: SlotChanges) -> None:
        self.host_slots.change(changes)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        self._kv[targets] = self._kv[sources]
        self.host_slots.copy_blocks(sources, targets)

    @property
    def cache_regions(self) -> list[NDArray[np.uint8]]:
        """The cache itself, as `ThreadCopier` copies it."""
        return [self._kv.view(np.uint8)[None]]

    def forget_drafts(self, blocks: NDArray[np.int32]) -> None:
        """Has the drafter forget what it keeps of blocks that are loaded from the host pool."""
        self.host_slots.forget_drafts(blocks)

    def is_broken_by(self, error: Exception) -> bool:
        return isinstance(error, BrokenDevice)

    def step(self, batch: StepBatch) -> StepOutput:
        began_at_ns = time.perf_counter_ns()
        batch = self.host_slots.gathered(batch)
        self._end_by_poison(batch)
        rows, awaits, ends = batch.drawing_rows, batch.awaits, batch.ends
        with np.errstate(over="ignore"):
            self._write_kv(batch)
            masked_hashes = self._context_hashes(batch, awaits, ends[awaits])
        if len(batch.drafts):
            forward_ns = time.perf_counter_ns() - began_at_ns
            output = self._verify(batch, rows)
        else:
            picked = self._picked(batch, rows, ends[rows])
            forward_ns = time.perf_counter_ns() - began_at_ns
            output = self._draw(batch, rows, picked)
        if len(awaits):
            output.masked_rows = MaskedDraw(
                partial(self._draw_masked, batch, masked_hashes, self.host_slots.epochs[batch.slots[awaits]])
            )
        self._add_prompt_logprobs(batch, output)
        output.forward_ns = forward_ns
        output.sample_ns = time.perf_counter_ns() - began_at_ns - forward_ns
        rest_s = self._step_s - (time.perf_counter_ns() - began_at_ns) / 1e9
        if rest_s > 0:  # sleep(0) would yield the processor, which costs a turn of every other process
            time.sleep(rest_s)
        return output

    def computed(self, batch: StepBatch) -> list[int]:
        """Writes the KV of a batch with inputs; returns the token after each row that samples, and writes none."""
        rows = np.flatnonzero(batch.sample)
        with np.errstate(over="ignore"):
            self._write_kv(batch)
        return self._picked(batch, rows, batch.ends[rows])

    def _end_by_poison(self, batch: StepBatch) -> None:
        if self._poison is None:
            return
        poisoned = batch.tokens == self._poison.token
        if len(batch.drafts):  # a wrong draft is no token of the sequence: `_verify` looks at those that are accepted
            poisoned &= batch.positions < np.repeat(batch.ends - batch.drafts, batch.counts)
        if poisoned.any():
            self._poison.end_step()

    def _write_kv(self, batch: StepBatch) -> None:
        mixed = self.shares.own(mix64_array(batch.tokens.astype(np.uint64) + np.uint64(1)))
        terms = mixed * self._powers_a[batch.positions]
        sums = np.cumsum(terms, dtype=np.uint64)
        firsts = np.cumsum(batch.counts) - batch.counts
        before_row = sums[firsts] - terms[firsts]
        previous = np.maximum(batch.starts - 1, 0)
        blocks = batch.block_tables[np.arange(len(batch.slots)), previous // self.block_size]
        prefix = np.where(batch.starts > 0, self._kv[blocks, previous % self.block_size], np.uint64(0))
        self._kv.reshape(-1)[batch.slot_mapping] = sums + np.repeat(prefix - before_row, batch.counts)

    def _context_hashes(
        self, batch: StepBatch, rows: NDArray[np.intp], ends: NDArray[np.integer]
    ) -> NDArray[np.uint64]:
        """Returns the hash of the first `ends` [L] positions of each of `rows` [L]."""
        tables = batch.block_tables[rows]
        context = self._kv[tables].reshape(len(rows), tables.shape[1] * self.block_size)
        weights = self._powers_b[: context.shape[1]]
        inside = np.arange(context.shape[1]) < ends[:, None]
        return self.shares.summed(np.where(inside, context * weights, np.uint64(0)).sum(axis=1, dtype=np.uint64))

    def _picked(self, batch: StepBatch, rows: NDArray[np.intp], ends: NDArray[np.integer]) -> list[int]:
        """Returns the token that follows the first `ends` [L] positions of each of `rows` [L]."""
        with np.errstate(over="ignore"):
            hashes = self._context_hashes(batch, rows, ends).tolist()
        places = zip(rows.tolist(), ends.tolist(), hashes, strict=True)
        return [self._pick(batch, row, position, value) for row, position, value in places]

    def _verify(self, batch: StepBatch, rows: NDArray[np.intp]) -> StepOutput:
        """Draws a token after each verified draft of `rows` [L] and after the token before them; accepts drafts."""
        drafted, ends = batch.drafts[rows], batch.ends[rows]
        drawing, positions = np.repeat(rows, 1 + drafted), run_positions(ends - drafted, 1 + drafted)
        draws = np.array(self._picked(batch, drawing, positions), np.int32)
        output = self.host_slots.verify(batch, rows, draws, self._finite(batch, drawing, positions))
        tokens = iter(output.tokens.tolist())
        for index, (row, count) in enumerate(zip(rows.tolist(), output.token_counts[rows].tolist(), strict=True)):
            top, kept = batch.states[row].logprobs, list(islice(tokens, count))
            if self._poison is not None and self._poison.token in kept[:-1]:  # accepted drafts, which are computed here
                self._poison.end_step()
            if top is not None and count:
                output.logprobs.append(self._row_logprobs(row, 0, kept, int(ends[index] - drafted[index]), top))
        return output

    def _finite(self, batch: StepBatch, rows: NDArray[np.intp], positions: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Returns whether the logits of the token at `positions` [L] of `rows` [L] are finite."""
        return np.ones(len(rows), np.bool_)

    def _draw(
        self,
        batch: StepBatch,
        rows: NDArray[np.intp],
        picked: list[int],
        gone: NDArray[np.bool_] | None = None,
        epochs: NDArray[np.int64] | None = None,
    ) -> StepOutput:
        tokens, slots = np.array(picked, np.int32), self.host_slots.redirected(batch.slots[rows], gone)
        finite = self._finite(batch, rows, batch.ends[rows])
        self.host_slots.write(slots, batch.ends[rows], tokens, epochs)  # rows in flight may read those not finite
        output = StepOutput.sampled(len(batch.slots), rows, tokens, finite)
        for row, token, usable in zip(rows.tolist(), picked, finite.tolist(), strict=True):
            top = batch.states[row].logprobs
            if top is not None and usable:
                output.logprobs.append(self._row_logprobs(row, 0, [token], int(batch.ends[row]), top))
        return output

    def _draw_masked(
        self,
        batch: StepBatch,
        hashes: NDArray[np.uint64],
        epochs: NDArray[np.int64],
        masks: NDArray[np.uint32],
        gone: NDArray[np.bool_],
    ) -> StepOutput:
        allowed = [np.flatnonzero(line).tolist() for line in allowed_ids(masks, self.model.vocab_size)]
        rows = zip(batch.awaits.tolist(), batch.ends[batch.awaits].tolist(), hashes.tolist(), allowed, strict=True)
        picked = [self._pick(batch, row, position, value, ids) for row, position, value, ids in rows]
        output = self._draw(batch, batch.awaits, picked, gone, epochs)
        single = {row: ids[0] for row, ids in zip(batch.awaits.tolist(), allowed, strict=True) if len(ids) == 1}
        for entry in output.logprobs:
            if entry.row in single:
                entry.CopyFrom(packed_logprobs(entry.row, 0, entry.top, [only_logprobs(single[entry.row], entry.top)]))
        return output

    def _pick(
        self, batch: StepBatch, row: int, position: int, context_hash: int, allowed: list[int] | None = None
    ) -> int:
        params, state = batch.params[row], batch.states[row]
        forbidden = state.stop_ids.tolist() if position - state.prompt_len < params["min_tokens"] else ()
        noise = (int(params["seed"]), int(params["sample_index"])) if params["temperature"] > 0 else None
        return self._picker.pick(context_hash, position, forbidden, noise, allowed)

    def _add_prompt_logprobs(self, batch: StepBatch, output: StepOutput) -> None:
        for row, state in enumerate(batch.states):
            scored = batch.num_scored(row)
            if state.prompt_logprobs is not None and scored:
                first = int(batch.starts[row]) + 1
                scored_tokens = state.tokens[first : first + scored].tolist()
                output.prompt_logprobs.append(
                    self._row_logprobs(row, first, scored_tokens, first, state.prompt_logprobs)
                )

    def _row_logprobs(
        self, row: int, first_position: int, tokens: Sequence[int], position: int, top: int
    ) -> plan_pb2.RowLogprobs:
        entries = [expected_logprobs(token, position + i, top, self.model.vocab_size) for i, token in enumerate(tokens)]
        return packed_logprobs(row, first_position, top, entries)


def expected_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    sample_index: int = 0,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    eos_probability: float = 1 / 64,
    vocab_size: int = NUM_TOKENS,
    allowed: Callable[[list[int]], Sequence[int]] | None = None,
) -> list[int]:
    """Returns what `HashBackend` with the same options generates after `prompt`.

    Generation ends after `max_tokens` or the first stop id, which is part of the result. `stop_ids` are the resolved
    ones, including the EOS id unless the request ignores it. `allowed`, for a constrained sequence, maps the tokens
    generated so far to the allowed ids in ascending order.
    """
    picker = TokenPicker(vocab_size, eos_probability)
    noise = (seed, sample_index) if temperature > 0 else None
    running = context_hash = position = 0
    power_a = power_b = 1
    generated: list[int] = []
    pending = list(prompt)
    while True:
        for token in pending:
            running = (running + mix64(token + 1) * power_a) & MASK64
            context_hash = (context_hash + running * power_b) & MASK64
            power_a, power_b = power_a * KV_BASE & MASK64, power_b * _B & MASK64
            position += 1
        if len(generated) == max_tokens or (generated and generated[-1] in stop_ids):
            return generated
        forbidden = stop_ids if len(generated) < min_tokens else ()
        ids = allowed(generated) if allowed is not None else None
        pending = [picker.pick(context_hash, position, forbidden, noise, ids)]
        generated += pending
