"""Plans that mostly fit a runner's state, with some values corrupted, drawn from a random generator or a fuzzer.

After each plan, the runner must have executed it, or refused it with a PlanFault and changed nothing. No slot, block or
position out of range may ever reach the backend.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from roster_common.link_protocol import AWAIT_FLAG, SAMPLE_FLAG
from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.runner import Runner
from runner_svc.interface.step import StepBatch, StepOutput
from runner_svc.tiers.kv_copier import Tickets
from tests.support.drafters import LyingDrafter
from tests.support.plans import admission, plan, sampling
from tests.support.stepped_copier import SteppedCopier

SLOTS, BLOCKS, BLOCK_SIZE, STEP_TOKENS, CONTEXT, VOCAB = 4, 12, 4, 16, 40, 259
MAX_DRAFTS, HOST_BLOCKS = 3, 7

ODD = (-1, 0, 1, 2, 3, SLOTS - 1, SLOTS, BLOCKS, BLOCKS + 1, BLOCK_SIZE, CONTEXT, 1000, 2**31 - 1, -(2**31))
ODD_NUMBERS = (0.0, -1.0, float("nan"), float("inf"), 1e38, 1e-45)


class Violation(AssertionError):
    """Raised when the runner let an invalid value through."""


class GuardedBackend(HashBackend):
    """Records values out of range instead of raising: the runner would turn an exception into a PlanFault."""

    def __init__(self) -> None:
        super().__init__(
            num_slots=SLOTS,
            block_size=BLOCK_SIZE,
            num_blocks=BLOCKS,
            max_step_tokens=STEP_TOKENS,
            context_length=CONTEXT,
            vocab_size=VOCAB,
            drafter=LyingDrafter(random.Random(7), VOCAB),
            max_drafts=MAX_DRAFTS,
        )
        self.violations: list[str] = []

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        self._require("copied blocks", np.concatenate([sources, targets]), 1, BLOCKS)
        super().copy_blocks(sources, targets)

    def step(self, batch: StepBatch) -> StepOutput:
        self._require("slots", batch.slots, 0, SLOTS - 1)
        self._require("starts", batch.starts, -1, CONTEXT - 1)
        self._require("drafts", batch.drafts, 0, MAX_DRAFTS)
        return super().step(batch)

    def _write_kv(self, batch: StepBatch) -> None:
        self._require("gathered starts", batch.starts, 0, CONTEXT - 1)
        self._require("ends", batch.ends, 1, CONTEXT)
        self._require("tokens", batch.tokens, 0, VOCAB - 1)
        self._require("slot mapping", batch.slot_mapping, BLOCK_SIZE, (BLOCKS + 1) * BLOCK_SIZE - 1)
        for row, end in enumerate(batch.ends):
            self._require("blocks", batch.block_tables[row][: -(-int(end) // BLOCK_SIZE)], 1, BLOCKS)
        super()._write_kv(batch)

    def _require(self, name: str, values: NDArray[Any], least: int, most: int) -> None:
        if len(values) and not (values.min() >= least and values.max() <= most):
            self.violations.append(f"{name} {values.tolist()}, must be {least} to {most}")


class GuardedCopier(SteppedCopier):
    """Records blocks out of range."""

    violations: list[str]

    def start(self, offloads: Tickets, loads: Tickets) -> None:
        for cached, hosted in ((offloads.sources, offloads.targets), (loads.targets, loads.sources)):
            for blocks, most in ((cached, BLOCKS), (hosted, HOST_BLOCKS)):
                if len(blocks) and not (blocks.min() >= 1 and blocks.max() <= most):
                    self.violations.append(f"blocks {blocks.tolist()} are copied, must be 1 to {most}")
        if not self.violations:
            super().start(offloads, loads)


class PlanFuzzer:
    """One runner and its plans. `integer(a, b)` draws from a to b; `data(n)` returns up to n bytes."""

    def __init__(self, integer: Callable[[int, int], int], data: Callable[[int], bytes]) -> None:
        self._integer, self._data = integer, data
        self.has_copied = False
        """Whether the last plan had copies and was executed."""
        self._backend = GuardedBackend()
        copier = GuardedCopier(self._backend.cache_regions, HOST_BLOCKS, random.Random(3), 0.2)
        copier.violations = self._backend.violations
        self._runner = Runner(self._backend, copier=copier)

    def turn(self) -> str:
        """Sends one plan; returns "executed", "refused" or "undecodable". Raises Violation."""
        if self._integer(0, 7) == 0:
            try:
                made = plan_pb2.Plan.FromString(self._data(self._integer(0, 64)))
            except DecodeError:
                return "undecodable"
        else:
            made = self._plan()
        self.has_copied = False
        before = self._state()
        number = before.last_plan + 1 if self._integer(0, 31) else self._integer(0, 5)
        try:
            launched = self._runner.launch(number, made)
            if launched.awaits_masks:
                launched.mask(self._masks(len(made.extent_slots) // 4))
            launched.wait()
        except PlanFault:
            after = self._state()
            if not self._backend.violations and after != before:
                raise Violation(f"a refused plan changed the slots: {before} became {after}") from None
            outcome = "refused"
            self._runner.reset(b"the same")
        else:
            outcome = "executed"
            self.has_copied = bool(made.offload_counts or made.load_counts)
        if self._backend.violations:
            raise Violation("; ".join(self._backend.violations))
        return outcome

    def _state(self) -> plan_pb2.Snapshot:
        """Returns the runner's snapshot without waiting for copies, as one for the scheduler does."""
        state = self._runner._state
        snapshot = plan_pb2.Snapshot(last_plan=self._runner.last_plan, sequences=state.residents())
        state.tickets.add_to(snapshot)
        return snapshot

    def _masks(self, rows: int) -> plan_pb2.Masks:
        """Returns masks of arbitrary bits, for rows that await them and for some that do not."""
        size = 4 * -(-VOCAB // 32)
        entries = [plan_pb2.RowMask(row=row, bits=self._data(size).ljust(size, b"\0")) for row in range(rows + 2)]
        return plan_pb2.Masks(rows=entries)

    def _plan(self) -> plan_pb2.Plan:
        counters = self._runner._state._counters
        resident = np.flatnonzero(counters.resident).tolist()
        releases = [slot for slot in resident if self._integer(0, 9) == 0]
        known = {slot: int(counters.num_tokens[slot]) for slot in resident if slot not in releases}
        computed = {slot: int(counters.computed[slot]) for slot in known}
        blocks = {slot: int(counters.num_blocks[slot]) for slot in known}
        admissions = []
        for slot in range(SLOTS):
            if slot not in known and self._integer(0, 2) == 0:
                admissions.append(self._admission(slot))
                known[slot] = len(admissions[-1].tokens) // 4
                computed[slot], blocks[slot] = admissions[-1].num_computed, len(admissions[-1].blocks) // 4
        appends = []
        for slot in known:
            if blocks[slot] * BLOCK_SIZE < known[slot] + 1 and self._integer(0, 5):
                appends.append((slot, blocks[slot], self._integer(1, BLOCKS)))
                blocks[slot] += 1
        copies = [(self._integer(1, BLOCKS), self._integer(1, BLOCKS)) for _ in range(self._integer(0, 8) // 7)]
        offloads, loads = (
            [[self._pair(kind) for _ in range(self._integer(1, 2))] for _ in range(self._integer(0, 8) // 7)]
            for kind in ("offload", "load")
        )
        extents, drafts, forced = [], [], []
        drafting, forcing = self._integer(0, 2) > 0, self._integer(0, 2) == 0
        for slot in known:
            room = min(blocks[slot] * BLOCK_SIZE, CONTEXT - 1) - known[slot]
            if forcing and computed[slot] == known[slot] - 1 and room > 0 and self._integer(0, 2) == 0:
                forced.append([self._integer(0, VOCAB - 1) for _ in range(self._integer(1, min(room, 4)))])
                extents.append((slot, computed[slot], 1 + len(forced[-1]), SAMPLE_FLAG | AWAIT_FLAG))
                drafts.append(0)
                continue
            forced.append([])
            if computed[slot] == known[slot] - 1 and room >= 0 and self._integer(0, 2):
                drafts.append(self._integer(0, min(room, MAX_DRAFTS)) if drafting else 0)
                extents.append((slot, -1, 1 + drafts[-1], SAMPLE_FLAG))
                continue
            count = min(known[slot], blocks[slot] * BLOCK_SIZE) - computed[slot]
            if count <= 0 or not self._integer(0, 4):
                forced.pop()
            else:
                count = min(count, self._integer(1, 8))
                sample = SAMPLE_FLAG if computed[slot] + count == known[slot] and known[slot] < CONTEXT else 0
                extents.append((slot, computed[slot], count, sample))
                drafts.append(0)
        made = plan(
            releases=releases,
            admissions=admissions,
            appends=appends,
            copies=copies,
            extents=extents,
            drafts=drafts if drafting else (),
            forced=forced if forcing else (),
            offloads=[[(cached, hosted, bytes(20)) for cached, hosted in ticket] for ticket in offloads],
            loads=loads,
        )
        for _ in range(max(0, self._integer(0, 5) - 3)):
            self._spoil(made)
        return made

    def _pair(self, kind: str) -> tuple[int, int]:
        """Returns source and target of a copy."""
        cached, hosted = self._integer(1, BLOCKS), self._integer(1, HOST_BLOCKS)
        if kind == "offload":
            return cached, hosted
        complete = np.flatnonzero(self._runner._state.tickets._complete).tolist()
        return complete[self._integer(0, len(complete) - 1)] if complete else hosted, cached

    def _admission(self, slot: int) -> plan_pb2.Admission:
        length = self._integer(1, 12)
        blocks = [self._integer(1, BLOCKS) for _ in range(-(-length // BLOCK_SIZE))]
        fields: dict[str, Any] = {"num_computed": self._integer(0, length - 1) if self._integer(0, 3) == 0 else 0}
        if self._integer(0, 3) == 0:
            fields["sampling"] = sampling(temperature=0.5, stop_ids=[3, 5], bias_ids=[1], bias_values=[2.0], logprobs=2)
        return admission(slot, [self._integer(0, VOCAB - 1) for _ in range(length)], blocks, **fields)

    def _spoil(self, made: plan_pb2.Plan) -> None:
        """Corrupts one value, or the length of one column."""
        target: Any = made
        if made.admissions and self._integer(0, 2) == 0:
            target = made.admissions[self._integer(0, len(made.admissions) - 1)]
            if self._integer(0, 2) == 0:
                target = target.sampling
        field = target.DESCRIPTOR.fields[self._integer(0, len(target.DESCRIPTOR.fields) - 1)]
        if field.is_repeated or field.message_type is not None:
            return
        if field.type == field.TYPE_BYTES:
            setattr(target, field.name, self._spoilt_column(getattr(target, field.name)))
        elif field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            setattr(target, field.name, ODD_NUMBERS[self._integer(0, len(ODD_NUMBERS) - 1)])
        elif field.cpp_type != field.CPPTYPE_STRING:
            value = ODD[self._integer(0, len(ODD) - 1)]
            signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
            setattr(
                target,
                field.name,
                value if signed else bool(value) if field.cpp_type == field.CPPTYPE_BOOL else abs(value),
            )

    def _spoilt_column(self, column: bytes) -> bytes:
        way = self._integer(0, 3)
        if way == 0:
            return column + self._data(self._integer(1, 8))
        if way == 1 or len(column) < 4:
            return column[: max(0, len(column) - self._integer(1, 5))]
        place = 4 * self._integer(0, len(column) // 4 - 1)
        value = ODD[self._integer(0, len(ODD) - 1)] if way == 2 else self._integer(-(2**31), 2**31 - 1)
        return column[:place] + value.to_bytes(4, "little", signed=True) + column[place + 4 :]
