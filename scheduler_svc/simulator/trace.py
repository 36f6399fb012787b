"""Traces of request arrivals, prompt lengths and output lengths, read from CSV and optionally rescaled.

The columns are those of bench/traces/README.md, `arrival_s,prompt_tokens,output_tokens[,prefix_hash_ids]`, and
optionally `tenant`, `priority`, `ttft_target_ms`, `itl_target_ms`, `max_tokens` and `acceptance`. Files ending
in .gz are decompressed.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from scheduler_svc.simulator.conversations.turn import Turn

HASH_BLOCK_TOKENS = 512
"""Tokens per hash id of a trace, before any division of lengths."""

REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL = ("prefix_hash_ids", "tenant", "priority", "ttft_target_ms", "itl_target_ms", "max_tokens", "acceptance")


class TraceError(ValueError):
    """A trace can't be used; the message names the file, the line and the error."""


@dataclass(slots=True, frozen=True)
class TraceRequest:
    """One request. It ends after exactly `output_tokens`; `max_tokens` is the limit that its client set.

    `prefix_hash_ids` identify the prompt's blocks of `Trace.hash_block_tokens` tokens; the last one may be partial.
    `acceptance`: shares of its drafts that are right (`Setup.acceptance`); empty for the usual ones.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_hash_ids: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None
    max_tokens: int | None = None
    acceptance: tuple[float, ...] = ()
    turn: Turn | None = None
    """Its place in a conversation, which gives its prompt and perhaps its arrival; no CSV has it."""


@dataclass(slots=True, frozen=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: tuple[TraceRequest, ...]
    hash_block_tokens: int = HASH_BLOCK_TOKENS

    def first(self, count: int) -> Trace:
        """Returns the trace's first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def at_rate(self, scale: float) -> Trace:
        """Returns the trace at `scale` times the request rate: arrival times are divided. Raises TraceError."""
        if scale <= 0:
            raise TraceError(f"the rate can't be scaled by {scale}: choose a number above 0")
        return self._mapped(lambda request: replace(request, arrival_s=request.arrival_s / scale))

    def jittered(self, seconds: float, rng: random.Random) -> Trace:
        """Returns the trace with U(0, `seconds`) added to each arrival, for traces with rounded timestamps."""
        moved = self._mapped(lambda request: replace(request, arrival_s=request.arrival_s + rng.uniform(0, seconds)))
        return replace(moved, requests=tuple(sorted(moved.requests, key=lambda request: request.arrival_s)))

    def divided(self, prompt_divisor: int, output_divisor: int) -> Trace:
        """Returns the trace with lengths divided and rounded up. A hash id then stands for
        `hash_block_tokens / prompt_divisor` tokens.

        Raises TraceError if a divisor is below 1, or if the trace has hash ids and that quotient is not a whole number.
        """
        if prompt_divisor < 1 or output_divisor < 1:
            raise TraceError("the divisors of lengths must be whole numbers of at least 1")
        has_hashes = any(request.prefix_hash_ids for request in self.requests)
        if has_hashes and self.hash_block_tokens % prompt_divisor:
            raise TraceError(
                f"prompts can't be divided by {prompt_divisor}: with prefix_hash_ids, the divisor must divide the "
                f"{self.hash_block_tokens} tokens of a block"
            )
        shorter = self._mapped(
            lambda request: replace(
                request,
                prompt_tokens=-(-request.prompt_tokens // prompt_divisor),
                output_tokens=-(-request.output_tokens // output_divisor),
                max_tokens=None if request.max_tokens is None else -(-request.max_tokens // output_divisor),
            )
        )
        return replace(shorter, hash_block_tokens=max(1, self.hash_block_tokens // prompt_divisor))

    def _mapped(self, function: Callable[[TraceRequest], TraceRequest]) -> Trace:
        return replace(self, requests=tuple(map(function, self.requests)))


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Reads and validates a trace. Raises TraceError, or OSError if the file can't be read."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:  # type: ignore[arg-type]
        reader = csv.DictReader(file)
        _check_header(path, reader.fieldnames or [])
        requests = tuple(islice(_rows(path, reader), limit))
    if not requests:
        raise TraceError(f"{path} has no rows")
    return Trace(path.name, requests)


def _check_header(path: Path, names: object) -> None:
    columns = list(names) if isinstance(names, list | tuple) else []
    missing = [name for name in REQUIRED if name not in columns]
    unknown = [name for name in columns if name not in REQUIRED + OPTIONAL]
    if missing:
        raise TraceError(f"{path}: the header lacks {', '.join(missing)}; it must name {', '.join(REQUIRED)}")
    if unknown:
        raise TraceError(f"{path}: unknown columns {', '.join(unknown)}; known are {', '.join(REQUIRED + OPTIONAL)}")


def _rows(path: Path, reader: csv.DictReader[str]) -> Iterator[TraceRequest]:
    latest_s = 0.0
    for row in reader:
        try:
            request = _request(row)
            if request.arrival_s < latest_s:
                raise ValueError(f"arrival_s {request.arrival_s} is before the row above ({latest_s}): sort the rows")
        except ValueError as error:
            raise TraceError(f"{path}, line {reader.line_num}: {error}") from error
        latest_s = request.arrival_s
        yield request


def _request(row: dict[str, str]) -> TraceRequest:
    prompt_tokens = _whole(row, "prompt_tokens", 1)
    hashes = tuple(int(part) for part in (row.get("prefix_hash_ids") or "").split())
    blocks = -(-prompt_tokens // HASH_BLOCK_TOKENS)
    if hashes and len(hashes) != blocks:
        raise ValueError(f"{len(hashes)} prefix_hash_ids for {blocks} blocks of {HASH_BLOCK_TOKENS} tokens")
    output_tokens, max_tokens = _whole(row, "output_tokens", 1), _optional_whole(row, "max_tokens", 1)
    if max_tokens is not None and max_tokens < output_tokens:
        raise ValueError(f"max_tokens {max_tokens} is below output_tokens {output_tokens}")
    return TraceRequest(
        arrival_s=_seconds(row, "arrival_s"),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefix_hash_ids=hashes,
        tenant=row.get("tenant") or "",
        priority=int(row.get("priority") or 0),
        ttft_target_ms=_optional_whole(row, "ttft_target_ms", 1),
        itl_target_ms=_optional_whole(row, "itl_target_ms", 1),
        max_tokens=max_tokens,
        acceptance=_shares(row, "acceptance"),
    )


def _whole(row: dict[str, str], name: str, least: int) -> int:
    text = row[name]
    try:
        value = int(text)
    except (TypeError, ValueError):
        value = least - 1
    if value < least:
        raise ValueError(f"{name} is {text!r}: it must be a whole number of at least {least}")
    return value


def _optional_whole(row: dict[str, str], name: str, least: int) -> int | None:
    return _whole(row, name, least) if row.get(name) else None


def _seconds(row: dict[str, str], name: str) -> float:
    text = row[name]
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {text!r}: it must be a number of seconds of at least 0")
    return value


def _shares(row: dict[str, str], name: str) -> tuple[float, ...]:
    text = row.get(name) or ""
    try:
        shares = tuple(float(part) for part in text.split())
    except ValueError:
        shares = (math.nan,)
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"{name} is {text!r}: it must be shares from 0 to 1, separated by spaces")
    return shares
