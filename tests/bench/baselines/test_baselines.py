"""Both baselines on a tiny model: order, arrival times, exact lengths, records, and equal greedy tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.baselines.__main__ import main
from bench.baselines.continuous_batching import BatchSizes, ContinuousBatching, continuous_batching
from bench.baselines.loading import load
from bench.baselines.padded_generate import PaddedGenerate
from bench.workload import BenchRequest, Workload
from roster_client.bench.record import RequestRecord
from roster_client.bench.record_file import read_run

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, eos_token_id=2,
)  # fmt: skip
LENGTHS = [3, 9, 1, 4, 2]
PROMPTS = [(5,), (5, 6), (5, 6, 7), (5, 6, 7, 8)]
LATE_S = 0.5
REQUESTS = [BenchRequest(prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=False)]
REQUESTS.append(BenchRequest((7,), LENGTHS[4], LATE_S))
SIZES = BatchSizes(slots=2, step_tokens=16, kv_tokens=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(CONFIG).save_pretrained(path)
    return path


def check_records(records: list[RequestRecord]) -> None:
    """Each request got exactly its tokens, none before it came."""
    assert [record.output_tokens for record in records] == LENGTHS
    for record, request in zip(records, REQUESTS, strict=True):
        assert record.ok and record.prompt_tokens == len(request.prompt)
        assert record.scheduled_s == request.arrival_s <= record.sent_s < record.first_token_s
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


def test_a_dead_manager_is_reported(folder: Path) -> None:
    system = ContinuousBatching(load(folder), SIZES)
    system.close()
    with pytest.raises(RuntimeError, match="has ended"):
        system.run(REQUESTS[:1])


@pytest.mark.parametrize("system", ["padded", "continuous"])
def test_the_command_writes_a_run(system: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload("five", "as written", tuple(REQUESTS), rate=8.0, seed=3, settings={"prompt_divisor": 16})
    workload.write(tmp_path / "requests.jsonl")
    assert Workload.read(tmp_path / "requests.jsonl") == workload
    files = [f"--workload={tmp_path / 'requests.jsonl'}", f"--out={tmp_path / 'run.jsonl'}"]
    sizes = ["--slots=2", "--threads=1", "--kv-tokens=256"]
    monkeypatch.setattr(sys, "argv", ["bench.baselines", system, *files, f"--model={folder}", *sizes])
    main()
    run = read_run(tmp_path / "run.jsonl")
    check_records(run.requests)
    header = run.header
    assert (header.workload, header.arrivals, header.rate, header.seed) == ("five", "as written", 8.0, 3)
    assert header.settings["prompt_divisor"] == 16 and header.settings["slots"] == 2
    assert header.system.startswith("transformers, ") and "core" in header.card and header.versions["torch"]
