"""The masks of one plan's constrained rows: each matcher is told the tokens since its last one, then all masks at once.

A mask has a bit per token id, set where the token may come next. Where the text is complete and nothing may follow,
that is an end-of-sequence token alone. Runs in a mask process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from scheduler_svc.constrained.columns import first_places
from scheduler_svc.constrained.process.compiler import sentence

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
        return self.problem(taken, tokens) if taken < len(tokens) or self.matcher.is_error() else ""

    def problem(self, taken: int, tokens: list[int]) -> str:
        """Why no more than `taken` of the tokens could be told, or no mask made; "" if all is well."""
        why = sentence(self.matcher.get_error()) if self.matcher.is_error() else ""
        if taken == len(tokens):
            return why
        return f"token {self.num_tokens} does not continue a match{why and ': '}{why}"

    def put_off_stops(self, bits: npt.NDArray[np.uint32], ahead: int = 0) -> None:
        """Excludes the stop tokens from the mask before `min_tokens`, unless nothing else is allowed.

        `ahead`: draft tokens before the mask's position.
        """
        if self.num_tokens + ahead >= self.min_tokens:
            return
        others = bits.copy()
        np.bitwise_and.at(others, self.stop_ids >> 5, ~(np.uint32(1) << (self.stop_ids & 31).astype(np.uint32)))
        if others.any():
            bits[:] = others


class MaskMaker:
    """Makes masks over `vocab_size` ids, of several rows in `threads` threads."""

    def __init__(self, vocab_size: int, threads: int) -> None:
        self.words = -(-vocab_size // 32)
        """uint32 of one mask."""
        self._executor = LLExecutor(threads)

    def make(
        self,
        outputs: list[OutputMatcher],
        tokens: list[list[int]],
        bits: npt.NDArray[np.uint32],
        drafts: Sequence[Sequence[int]] = (),
    ) -> tuple[list[int], list[tuple[int, str]]]:
        """Fills `bits` [positions, words] with 1 + len(draft) masks a row, one behind each draft token.

        By row: whose masks are asked for, the `tokens` that its matcher lacks, and the `drafts` that may come after
        them, empty where no row has any. Returns the positions of each row that may be reached: masks behind a draft
        token that is not allowed are not made. And (index, why) of each row whose matcher has failed: its one mask
        allows everything. The matchers stand where `tokens` end. Never raises for what a request is to blame for.
        """
        counts, failures = [1] * len(outputs), []
        plain, drafted, places = [], [], first_places(len(outputs), drafts)
        for index, (output, told, place) in enumerate(zip(outputs, tokens, places, strict=True)):
            matcher = output.matcher
            # The first takes two thirds of the second's time. One that fails it can't go on: no mask allowed the token.
            taken = matcher.consume_token(told[0]) if len(told) == 1 else matcher.try_consume_tokens(told)
            output.num_tokens += taken
            if taken < len(told):
                failures.append((index, output.problem(taken, told)))
                bits[place] = _ALL
            elif drafts and drafts[index] and (valid := matcher.validate_tokens(list(drafts[index]))):
                counts[index] += valid
                drafted.append((matcher, place, list(drafts[index][:valid])))
            else:
                plain.append((matcher, place))
        address, size = bits.__array_interface__["data"][0], 4 * self.words  # bits.ctypes takes 1 µs more
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, address, size, len(bits))
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, address, size, len(bits))
        self._settle(outputs, places, bits, counts, failures)
        return counts, failures

    def _settle(
        self,
        outputs: list[OutputMatcher],
        places: Sequence[int],
        bits: npt.NDArray[np.uint32],
        counts: list[int],
        failures: list[tuple[int, str]],
    ) -> None:
        """Finds the matchers that failed over their masks, and puts off the stop tokens of the others."""
        failed = {index for index, _ in failures}
        for index in [index for index, output in enumerate(outputs) if output.matcher.is_error()]:
            if index not in failed:
                failed.add(index)
                failures.append((index, sentence(outputs[index].matcher.get_error())))
                bits[places[index]], counts[index] = _ALL, 1
        for index in [index for index, output in enumerate(outputs) if output.num_tokens < output.min_tokens]:
            if index not in failed:
                for ahead in range(counts[index]):
                    outputs[index].put_off_stops(bits[places[index] + ahead], ahead)
