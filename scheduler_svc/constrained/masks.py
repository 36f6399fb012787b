"""The masks of one plan's constrained rows: each matcher is told the tokens since its last one, then all masks at once.

A mask has a bit per token id, set where the token may come next. Where the text is complete and nothing may follow,
that is an end-of-sequence token alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from protos import plan_pb2
from scheduler_svc.constrained.compiler import sentence

_ALL = 0xFFFFFFFF


@dataclass(slots=True, eq=False)
class OutputMatcher:
    """Where one sequence stands in its grammar. Belongs to whichever thread makes masks."""

    matcher: LLMatcher
    min_tokens: int
    """No stop token comes before this many, as long as anything else may."""
    stop_ids: npt.NDArray[np.int32]
    num_tokens: int = 0
    """Generated tokens that the matcher was told."""

    def feed(self, tokens: list[int]) -> str:
        """Tells the next tokens; why they can't be, "" if they can."""
        taken = self.matcher.try_consume_tokens(tokens)
        self.num_tokens += taken
        if self.matcher.is_error():
            return sentence(self.matcher.get_error())
        if taken < len(tokens):
            return f"token {self.num_tokens} does not continue a match"
        return ""

    def put_off_stops(self, bits: npt.NDArray[np.uint32]) -> None:
        """Excludes the stop tokens from the mask before `min_tokens`, unless nothing else is allowed."""
        if self.num_tokens >= self.min_tokens:
            return
        others = bits.copy()
        np.bitwise_and.at(others, self.stop_ids >> 5, ~(np.uint32(1) << (self.stop_ids & 31).astype(np.uint32)))
        if others.any():
            bits[:] = others


@dataclass(slots=True, frozen=True)
class AwaitedRow:
    """A row that waits for its mask: the plan's row, whose it is, and the tokens that its matcher lacks."""

    row: int
    output: OutputMatcher
    tokens: list[int]


@dataclass(slots=True)
class MadeMasks:
    """What the runner gets, and the rows whose matcher has failed: they get a mask that allows everything."""

    masks: plan_pb2.Masks
    failures: list[tuple[int, str]] = field(default_factory=list)
    """(index among the awaited rows, why)."""


class MaskMaker:
    """Makes masks over `vocab_size` ids, of several rows in `threads` threads."""

    def __init__(self, vocab_size: int, threads: int) -> None:
        self._words = -(-vocab_size // 32)
        self._executor = LLExecutor(threads)

    def make(self, rows: list[AwaitedRow]) -> MadeMasks:
        """The masks of the rows; never raises for what a request is to blame for."""
        bits = np.full((len(rows), self._words), _ALL, "<u4")
        made = MadeMasks(plan_pb2.Masks())
        ready = []
        for index, row in enumerate(rows):
            problem = row.output.feed(row.tokens)
            if problem:
                made.failures.append((index, problem))
            else:
                ready.append((row.output.matcher, index))
        self._executor.unsafe_compute_mask_ptr(ready, bits.ctypes.data, 4 * self._words, len(rows))
        for matcher, index in ready:
            if matcher.is_error():
                bits[index] = _ALL
                made.failures.append((index, sentence(matcher.get_error())))
            else:
                rows[index].output.put_off_stops(bits[index])
        for row, line in zip(rows, bits, strict=True):
            made.masks.rows.add(row=row.row, bits=line.tobytes())
        return made

    def free(self, rows: list[AwaitedRow]) -> plan_pb2.Masks:
        """Masks that allow everything."""
        masks, bits = plan_pb2.Masks(), np.full(self._words, _ALL, "<u4").tobytes()
        for row in rows:
            masks.rows.add(row=row.row, bits=bits)
        return masks
