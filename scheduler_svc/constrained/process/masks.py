"""Masks of one plan's constrained rows: advances each matcher by its new tokens, then makes all masks at once.

A mask has a bit per token id, set if the token may come next. If the text is complete and nothing may follow, only the
end-of-sequence tokens are set. Where a mask allows exactly one token, that token is *forced*: it comes next whatever
the logits are. A run of forced tokens ends before a stop token, and where a mask allows several tokens. Runs in a mask
process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from scheduler_svc.constrained.columns import first_places
from scheduler_svc.constrained.process.compiler import sentence

_ALL = 0xFFFFFFFF
"""Every token of a word is allowed: what a failed row gets, whose request ends."""
MOST_FORCED = 64
"""Maximum number of forced tokens that one call finds for a row."""
FORCED_S = 0.005
"""Usual time for which a call looks for forced tokens: the other rows' masks wait for it."""

_FIRST = 64
"""Words of a mask that are looked at first: a mask that allows any text has several tokens there."""

Mask = npt.NDArray[np.uint32]
"""[words]"""


@dataclass(slots=True, eq=False)
class OutputMatcher:
    """Position of one sequence in its grammar. Used by the thread that makes masks only."""

    matcher: LLMatcher
    min_tokens: int
    """Generated tokens before which no stop token is allowed, unless nothing else is."""
    stop_ids: npt.NDArray[np.int32]
    num_tokens: int = 0
    """Number of generated tokens that the matcher has consumed."""
    ahead: Mask | None = None
    """The next mask, if it has been made already."""

    def feed(self, tokens: list[int]) -> str:
        """Advances the matcher by `tokens`; returns why it can't accept them, or "" if it has."""
        taken = self.matcher.try_consume_tokens(tokens)
        self.num_tokens += taken
        return self.problem(taken, tokens) if taken < len(tokens) or self.matcher.is_error() else ""

    def problem(self, taken: int, tokens: list[int]) -> str:
        """Returns why only `taken` of the tokens were accepted or the matcher failed; "" if there is no problem."""
        why = sentence(self.matcher.get_error()) if self.matcher.is_error() else ""
        if taken == len(tokens):
            return why
        return f"token {self.num_tokens} does not continue a match{why and ': '}{why}"

    def take_forced(self, token: int, run: list[int]) -> bool:
        """Advances the matcher by the forced token and appends it to `run`. Returns whether a mask may come after it.

        A stop token ends the text, so the matcher does not take it, nor one more than MOST_FORCED.
        """
        if len(run) == MOST_FORCED or token in self.stop_ids or not self.matcher.consume_token(token):
            return False
        self.num_tokens += 1
        run.append(token)
        return True

    def put_off_stops(self, bits: npt.NDArray[np.uint32], ahead: int = 0) -> None:
        """Clears the stop tokens in the mask before `min_tokens`, unless nothing else is allowed.

        `ahead`: draft tokens before the mask's position.
        """
        if self.num_tokens + ahead >= self.min_tokens:
            return
        others = bits.copy()
        np.bitwise_and.at(others, self.stop_ids >> 5, ~(np.uint32(1) << (self.stop_ids & 31).astype(np.uint32)))
        if others.any():
            bits[:] = others


class MaskMaker:
    """Makes masks over `vocab_size` ids, for several rows in `threads` threads."""

    def __init__(self, vocab_size: int, threads: int) -> None:
        self.words = -(-vocab_size // 32)
        """Number of uint32 in one mask."""
        self._executor = LLExecutor(threads)
        self.forced_s = FORCED_S
        """Time after which `force` looks for no further forced tokens."""

    def make(
        self,
        outputs: list[OutputMatcher],
        tokens: list[list[int]],
        bits: npt.NDArray[np.uint32],
        drafts: Sequence[Sequence[int]] = (),
    ) -> tuple[list[int], list[tuple[int, str]]]:
        """Fills `bits` [positions, words] uint32 with 1 + len(draft) masks per row: one more after each draft token.

        By row: the matcher in `outputs`, the `tokens` that it lacks, and the `drafts` that may come after them (empty
        if no row has any). The matchers end up after `tokens`. Returns the number of masks made per row, as none is
        made after a draft token that is not allowed, and (index, reason) of each row whose matcher has failed: its
        only mask allows every token. Never raises for a fault of a request.
        """
        counts, failures = [1] * len(outputs), []
        plain, drafted, places = [], [], first_places(len(outputs), drafts)
        for index, (output, told, place) in enumerate(zip(outputs, tokens, places, strict=True)):
            matcher, ahead, output.ahead = output.matcher, output.ahead, None
            if not told and ahead is not None and not drafts:
                bits[place] = ahead
                continue
            # `consume_token` takes two thirds of the other's time. A matcher that fails it can't continue, but that is
            # no loss: no mask allowed the token.
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

    def force(
        self, outputs: list[OutputMatcher], bits: npt.NDArray[np.uint32], failed: Iterable[int]
    ) -> list[list[int]]:
        """Returns the forced tokens of each row, at most MOST_FORCED, and advances its matcher by them.

        `bits` [rows, words] are the masks that `make` has just made, one per row, and stay as they are. `failed`: rows
        to leave out. The masks after the forced tokens are kept for the next call of `make`.
        """
        runs: list[list[int]] = [[] for _ in outputs]
        until_at, left_out = time.monotonic() + self.forced_s, set(failed)
        rows, masks = [index for index in range(len(outputs)) if index not in left_out], bits
        if len(rows) < len(outputs):
            masks = bits[rows]
        while rows:
            single = [(rows[place], token) for place, token in only_tokens(masks)]
            rows = [index for index, token in single if outputs[index].take_forced(token, runs[index])]
            if not rows:
                break
            masks = np.empty((len(rows), self.words), np.uint32)
            address = masks.__array_interface__["data"][0]
            matchers = [(outputs[index].matcher, place) for place, index in enumerate(rows)]
            self._executor.unsafe_compute_mask_ptr(matchers, address, 4 * self.words, len(masks))
            going = [place for place, index in enumerate(rows) if not outputs[index].matcher.is_error()]
            if len(going) < len(rows):  # the next call reports it
                rows, masks = [rows[place] for place in going], masks[going]
            for index, mask in zip(rows, masks, strict=True):
                outputs[index].put_off_stops(mask)
                outputs[index].ahead = mask
            if time.monotonic() >= until_at:
                break
        return runs

    def _settle(
        self,
        outputs: list[OutputMatcher],
        places: Sequence[int],
        bits: npt.NDArray[np.uint32],
        counts: list[int],
        failures: list[tuple[int, str]],
    ) -> None:
        """Finds the matchers that failed while making masks, and clears the stop tokens of the others."""
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


def only_tokens(bits: npt.NDArray[np.uint32]) -> list[tuple[int, int]]:
    """Returns (index, token) of each of the masks `bits` [rows, words] that allows exactly one token."""
    found = []
    for index in np.flatnonzero(np.count_nonzero(bits[:, :_FIRST], axis=1) <= 1).tolist():
        if np.count_nonzero(bits[index]) != 1:
            continue
        (place,) = np.flatnonzero(bits[index]).tolist()
        word = int(bits[index, place])
        if word & (word - 1) == 0:
            found.append((index, 32 * place + word.bit_length() - 1))
    return found
