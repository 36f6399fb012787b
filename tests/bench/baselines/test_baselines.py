"""Both baselines on a tiny model: order, arrival times, exact lengths, records, and equal greedy tokens."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.baselines.__main__ import main
from bench.baselines.continuous_batching import BatchSizes, ContinuousBatching, continuous_batching
from bench.baselines.loading import load
from bench.baselines.padded_generate import PaddedGenerate
from bench.baselines.workload_file import read_workload, write_workload
from roster_client.bench.load.workload import LoadRequest, Workload
from roster_client.bench.records.record import RequestRecord, Status
from roster_client.bench.records.record_file import read_run

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, eos_token_id=2,
)  # fmt: skip
LENGTHS = [3, 9, 1, 4, 2]
PROMPT_LENGTHS = [1, 2, 3, 4, 1]
LATE_S = 0.5
ARRIVALS_S = [0.0, 0.0, 0.0, 0.0, LATE_S]
REQUESTS = [
    LoadRequest(f"r{number}", arrival_s, np.arange(5, 5 + prompt, dtype=np.int32), prompt, output, tenant="t")
    for number, (arrival_s, prompt, output) in enumerate(zip(ARRIVALS_S, PROMPT_LENGTHS, LENGTHS, strict=True))
]
SIZES = BatchSizes(slots=2, step_tokens=16, kv_tokens=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(CONFIG).save_pretrained(path)
    return path


def check_records(records: list[RequestRecord]) -> None:
    """Checks that each request got exactly its tokens, none before it arrived."""
    assert [record.output_tokens for record in records] == LENGTHS
    for record, request in zip(records, REQUESTS, strict=True):
        assert record.ok and record.prompt_tokens == request.prompt_tokens
        assert (record.request_id, record.tenant) == (request.request_id, "t")
        assert record.scheduled_s == request.scheduled_s <= record.sent_s < record.first_token_s
        assert record.message_s == tuple(sorted(record.message_s))
        assert len(record.message_s) == len(record.message_tokens) == record.output_tokens


def test_padded_batches_serve_in_order_and_last_as_long_as_their_longest(folder: Path) -> None:
    records = PaddedGenerate(load(folder), 2).run(REQUESTS)
    check_records(records)
    # Both of a batch get their first token in the same step, and the next batch begins when the longest has ended.
    assert records[0].first_token_s == records[1].first_token_s
    assert records[0].last_token_s < records[1].last_token_s < records[2].first_token_s == records[3].first_token_s
    assert records[4].first_token_s >= LATE_S


def test_continuous_batching_lets_requests_join_when_another_leaves(folder: Path) -> None:
    with continuous_batching(load(folder), SIZES) as system:
        system.run(REQUESTS[:1])
        records = system.run(REQUESTS)
    check_records(records)
    # Two run at once: the third joins when the first has ended, while the second still runs.
    assert records[0].last_token_s <= records[2].first_token_s <= records[1].last_token_s


def test_what_has_not_ended_in_time_is_given_up_with_what_it_had(folder: Path) -> None:
    endless = replace(REQUESTS[0], request_id="endless", output_tokens=100_000)
    waiting = replace(REQUESTS[1], request_id="waiting", output_tokens=100_000)
    late = replace(REQUESTS[2], request_id="late", scheduled_s=60.0)
    sizes = replace(SIZES, slots=1, kv_tokens=131_072)
    with continuous_batching(load(folder), sizes) as system:
        records = system.run([endless, waiting, late], end_s=1.0)
        again = system.run(REQUESTS[:1], end_s=100.0)
    assert [record.request_id for record in records] == ["endless", "waiting"], (
        "a request that was not sent is not listed"
    )
    assert all(record.status is Status.TIMEOUT for record in records)
    assert 0 < records[0].output_tokens == len(records[0].message_s) < 100_000
    assert records[1].output_tokens == 0
    assert again[0].ok, "cancelled requests leave nothing behind"


def test_a_dead_manager_is_reported(folder: Path) -> None:
    system = ContinuousBatching(load(folder), SIZES)
    system.close()
    with pytest.raises(RuntimeError, match="has ended"):
        system.run(REQUESTS[:1])


@pytest.mark.parametrize("system", ["padded", "continuous"])
def test_the_command_writes_a_run(system: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload("five", "as written", 8.0, tuple(REQUESTS), {"prompt_divisor": 16}, ("a note",))
    write_workload(tmp_path / "requests.jsonl", workload)
    files = [f"--workload={tmp_path / 'requests.jsonl'}", f"--out={tmp_path / 'run.jsonl'}"]
    sizes = ["--slots=2", "--threads=1", "--kv-tokens=256", "--seed=3"]
    monkeypatch.setattr(sys, "argv", ["bench.baselines", system, *files, f"--model={folder}", *sizes])
    main()
    run = read_run(tmp_path / "run.jsonl")
    check_records(run.requests)
    header = run.header
    assert header.notes == ["a note"]
    assert (header.workload, header.arrivals, header.rate, header.seed) == ("five", "as written", 8.0, 3)
    assert header.settings["prompt_divisor"] == 16 and header.settings["slots"] == 2
    assert header.system.startswith("transformers, ") and "core" in header.card and header.versions["torch"]


def test_a_workload_comes_back_from_its_file(tmp_path: Path) -> None:
    workload = Workload("five", "as written", None, tuple(REQUESTS))
    write_workload(tmp_path / "requests.jsonl", workload)
    again = read_workload(tmp_path / "requests.jsonl")
    assert replace(again, requests=()) == replace(workload, requests=())
    for one, other in zip(again.requests, REQUESTS, strict=True):
        assert one.prompt.dtype == np.int32 and np.array_equal(one.prompt, other.prompt)
        assert asdict(one) | {"prompt": ""} == asdict(other) | {"prompt": ""}
    with pytest.raises(TypeError, match="r0 is a text"):
        write_workload(tmp_path / "texts.jsonl", replace(workload, requests=(replace(REQUESTS[0], prompt="a text"),)))
