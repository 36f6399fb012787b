"""Reading and rescaling traces, and prompts that share exactly the trace's prefixes."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.simulator.prompts import prompt_tokens
from scheduler_svc.simulator.trace import Trace, TraceError, TraceRequest, read_trace

TRACES = Path(__file__).resolve().parents[3] / "bench" / "traces"
SIZES = {
    "azure_code_2023_full.csv.gz": (8819, 18_061_000),
    "azure_conv_2023_full.csv.gz": (19366, 22_360_000),
    "mooncake_conversation_full.csv.gz": (12031, 144_790_000),
    "mooncake_synthetic_full.csv.gz": (3993, 61_190_000),
    "azure_conv_2023_busiest2000.csv": (2000, None),
}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_shipped_traces(name: str) -> None:
    trace = read_trace(TRACES / name)
    rows, prompt_total = SIZES[name]
    assert len(trace.requests) == rows
    if prompt_total is not None:
        assert sum(request.prompt_tokens for request in trace.requests) == pytest.approx(prompt_total, rel=0.01)
    assert all(bool(request.prefix_hash_ids) == name.startswith("mooncake") for request in trace.requests)


def write(path: Path, text: str) -> Path:
    path.write_text("arrival_s,prompt_tokens,output_tokens,prefix_hash_ids,tenant,max_tokens,acceptance\n" + text)
    return path


def test_all_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "0,513,2,7 8,a,,0.5 0.25\n1.5,1,3,,,9,\n")
    assert read_trace(path).requests == (
        TraceRequest(0.0, 513, 2, (7, 8), "a", acceptance=(0.5, 0.25)),
        TraceRequest(1.5, 1, 3, max_tokens=9),
    )
    packed = tmp_path / "t.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(packed).requests == read_trace(path).requests
    assert len(read_trace(path, limit=1).requests) == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", "has no rows"),
        ("x,1,1,,,\n", "line 2: arrival_s is 'x'"),
        ("nan,1,1,,,\n", "arrival_s is 'nan'"),
        ("-1,1,1,,,\n", "arrival_s is '-1'"),
        ("0,1.5,1,,,\n", "prompt_tokens is '1.5'"),
        ("0,1,0,,,\n", "output_tokens is '0'"),
        ("0,1\n", "output_tokens is None"),
        ("0,513,1,7,,\n", "1 prefix_hash_ids for 2 blocks"),
        ("0,5,1,x,,\n", "line 2: "),
        ("0,5,10,,,9\n", "max_tokens 9 is below output_tokens 10"),
        ("0,5,1,,,,0.5 2\n", "acceptance is '0.5 2'"),
        ("0,5,1,,,,high\n", "acceptance is 'high'"),
        ("1,5,1,,,\n0,5,1,,,\n", "line 3: arrival_s 0.0 is before the row above"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, rows: str, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        read_trace(write(tmp_path / "t.csv", rows))


def test_wrong_headers(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens\n0,1\n")
    with pytest.raises(TraceError, match="lacks output_tokens"):
        read_trace(path)
    path.write_text("arrival_s,prompt_tokens,output_tokens,colour\n0,1,1,red\n")
    with pytest.raises(TraceError, match="unknown columns colour"):
        read_trace(path)


def test_rate_jitter_and_lengths() -> None:
    trace = Trace("t", tuple(TraceRequest(float(3 * (i // 4)), 513 + i, 5, (1, 2)) for i in range(40)))
    assert trace.at_rate(2.0).requests[-1].arrival_s == 13.5
    jittered = [request.arrival_s for request in trace.jittered(3.0, random.Random(1)).requests]
    assert jittered == sorted(jittered) and len(set(jittered)) == 40 and max(jittered) < 30
    shorter = trace.divided(32, 4)
    assert shorter.hash_block_tokens == 16
    assert {(r.prompt_tokens, r.output_tokens) for r in shorter.requests} == {(17, 2), (18, 2)}
    assert all(len(r.prefix_hash_ids) == -(-r.prompt_tokens // 16) for r in shorter.requests)
    with pytest.raises(TraceError, match="the divisor must divide the 512 tokens"):
        trace.divided(100, 1)
    with pytest.raises(TraceError, match="above 0"):
        trace.at_rate(0)


def test_prompts_share_exactly_the_blocks_whose_ids_they_share() -> None:
    rows = [(1, 2, 3), (1, 2, 4), (5, 2, 3), ()]
    trace = Trace("t", tuple(TraceRequest(0.0, 1500, 1, ids) for ids in rows))
    prompts = [prompt_tokens(trace, index, 32_000) for index in range(4)]
    assert {len(prompt) for prompt in prompts} == {1500}
    assert all(prompt.min() >= 256 and prompt.max() < 32_000 for prompt in prompts)
    for a, first in enumerate(prompts):
        for b, second in enumerate(prompts):
            for block in range(3):
                span = slice(512 * block, 512 * (block + 1))
                same = a == b or bool(rows[a] and rows[b] and rows[a][block] == rows[b][block])
                assert np.array_equal(first[span], second[span]) == same
