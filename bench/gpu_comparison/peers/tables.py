"""Markdown tables of the comparison with a peer: `python -m bench.gpu_comparison --table FILE...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.gpu_comparison.peers.parts import AT_ONCE, DECODE, DECODE_ROWS, DECODE_WIDE, ONLINE, PADDED, Part
from bench.gpu_comparison.peers.records import PeerRecord, read_records

NAMES = {
    "roster": "Roster, default",
    "roster-tuned": "Roster, tuned",
    "vllm": "vLLM, default",
    "vllm-1024": "vLLM, `--max-num-batched-tokens 1024`",
    "transformers": "transformers, padded `generate`",
}


def print_tables(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables of record files; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_comparison")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", required=True)
    try:
        records = [one for path in parser.parse_args(arguments).table for one in read_records(path)]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(markdown(records))
    return 0


def markdown(records: Iterable[PeerRecord]) -> str:
    """Returns the tables, one section per card and shape; of parts measured twice, the later record counts."""
    kept = {(one.card_id, one.shape, one.system, one.load): one for one in records}

    def place(one: PeerRecord) -> tuple[str, str]:
        return one.card_id, one.shape

    sections = [_section(list(group)) for _, group in groupby(sorted(kept.values(), key=place), key=place)]
    return "\n\n".join(sections)


def _section(records: Sequence[PeerRecord]) -> str:
    first = records[0]
    versions = sorted({f"{one.system.split('-')[0]} {one.version}" for one in records})
    commits = sorted({_short(one.commit) for one in records if one.system.startswith("roster")})
    dates = sorted({one.date[:10] for one in records})
    title = f"{first.shape} on one {first.card} ({first.card_id}), {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"
    about = f"{title}; {', '.join(versions)}" + (f"; commit {', '.join(commits)}" if commits else "")
    parts = [about, _online(records), _at_once(records), _decode(records), _clients(records)]
    return "\n\n".join(part for part in parts if part)


def _short(commit: str) -> str:
    """Returns the commit's first 7 digits, and "-dirty" where it says so."""
    digits, dash, rest = commit.partition("-")
    return digits[:7] + dash + rest


def _of_kinds(records: Sequence[PeerRecord], *kinds: str) -> list[PeerRecord]:
    order = list(NAMES)
    found = [one for one in records if Part(one.system, one.load).kind in kinds]
    return sorted(found, key=lambda one: order.index(one.system))


def _online(records: Sequence[PeerRecord]) -> str:
    rows = []
    for one in sorted(_of_kinds(records, ONLINE), key=lambda one: Part(one.system, one.load).rate):
        numbers, rate = one.numbers, Part(one.system, one.load).rate
        rows.append(
            [
                f"{rate:g} / s",
                NAMES[one.system],
                _pair(numbers["ttft_ms"], "p50", "p90", "p99"),
                _pair(numbers["itl_ms"], "p50", "p99"),
                f"{numbers['e2e_ms']['p50'] / 1e3:.2f} s",
                f"{numbers['tokens_per_s']:,.0f}",
            ]
        )
    columns = ["Poisson", "", "TTFT p50 / p90 / p99", "ITL p50 / p99", "E2E p50", "tokens/s"]
    return _table(columns, rows)


def _at_once(records: Sequence[PeerRecord]) -> str:
    rows = [
        [
            f"{one.numbers['requests']:,}",
            NAMES[one.system] + (f", {Part(one.system, one.load).rows} rows" if one.load.startswith(PADDED) else ""),
            f"{one.numbers['seconds']:.2f} s",
            f"{one.numbers['tokens_per_s']:,.0f}",
            f"{one.numbers['e2e_ms']['p50'] / 1e3:.2f} s",
        ]
        for one in _of_kinds(records, AT_ONCE, PADDED)
    ]
    return _table(["at once", "", "total time", "tokens/s", "E2E p50"], rows)


def _decode(records: Sequence[PeerRecord]) -> str:
    found = _of_kinds(records, DECODE, DECODE_WIDE)
    steps: dict[str, dict[str, float]] = {}
    for one in found:
        steps.setdefault(one.system, {}).update(one.numbers["step_ms"])
    sizes = [str(rows) for name in (DECODE, DECODE_WIDE) for rows in DECODE_ROWS[name]]
    used = [size for size in sizes if any(size in values for values in steps.values())]
    rows = [
        [NAMES[system], *(f"{values[size]:.2f}" if size in values else "-" for size in used)]
        for system, values in steps.items()
    ]
    return _table(["decode, ms per step, rows", *(f"{int(size):,}" for size in used)], rows)


def _clients(records: Sequence[PeerRecord]) -> str:
    late = [one.numbers["client_late_ms"]["p99"] for one in _of_kinds(records, ONLINE)]
    cached = sum(one.numbers.get("cached_tokens", 0) for one in records)
    if not late:
        return ""
    note = f"The load generators sent requests at most {max(late):.1f} ms late (p99 of each load)."
    return note + (f" {cached:,} prompt tokens came from a prefix cache." if cached else "")


def _pair(values: dict[str, Any], *names: str) -> str:
    def text(value: float) -> str:
        return f"{value:.1f}" if value < 100 else f"{value:.0f}"

    return " / ".join(text(values[name]) for name in names if name in values) + (" ms" if values else "-")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, "" if it has no rows."""
    if not rows:
        return ""
    line: Callable[[Sequence[str]], str] = lambda cells: f"| {' | '.join(cells)} |"  # noqa: E731
    return "\n".join([line(columns), f"|{'---|' * len(columns)}", *map(line, rows)])
