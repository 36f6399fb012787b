"""The parts of the serving benchmark: workload, measurement, and the padded baseline on a tiny model."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.measurement import Served, report
from bench.padded_generate import PaddedGenerate
from bench.workload import TRACES, BenchRequest, from_trace, with_poisson_arrivals

TRACE = "azure_conv_2023_busiest2000.csv"


def test_lengths_are_the_divided_ones_of_the_trace() -> None:
    requests = from_trace(TRACE, 64, 16, 4, 1000, seed=1)
    with (TRACES / TRACE).open(newline="") as file:
        rows = list(csv.DictReader(file))[:64]
    for request, row in zip(requests, rows, strict=True):
        assert len(request.prompt) == max(1, int(row["prompt_tokens"]) // 16)
        assert request.output_tokens == max(1, int(row["output_tokens"]) // 4)
        assert all(256 <= token < 1000 for token in request.prompt)
    assert requests == from_trace(TRACE, 64, 16, 4, 1000, seed=1) != from_trace(TRACE, 64, 16, 4, 1000, seed=2)
    with pytest.raises(ValueError, match="2000 rows"):
        from_trace(TRACE, 2001, 16, 4, 1000, seed=1)


def test_poisson_arrivals_keep_order_and_rate() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    requests = [BenchRequest((number,), 1) for number in range(4000)]
    arriving = with_poisson_arrivals(requests, 5.0, seed)
    times = [request.arrival_s for request in arriving]
    assert [request.prompt for request in arriving] == [request.prompt for request in requests]
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.1)


def test_a_report_counts_from_the_first_arrival_to_the_last_token() -> None:
    served = [Served(1.0, 1.5, 3.0, 10), Served(2.0, 4.0, 6.0, 20), Served(3.0, 3.25, 3.5, 5)]
    run = report("x", "y", served)
    assert (run.requests, run.useful_tokens, run.seconds, run.useful_tokens_per_s) == (3, 35, 5.0, 7.0)
    assert (run.ttft_mean_s, run.ttft_p50_s, run.ttft_p99_s) == (pytest.approx(2.75 / 3), 0.5, 2.0)


def test_padded_batches_serve_in_order_and_count_what_was_asked(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    lengths = [3, 9, 1, 4, 2]
    requests = [BenchRequest(tuple(range(5, 6 + i)), length, 0.0) for i, length in enumerate(lengths[:4])]
    requests.append(BenchRequest((7,), lengths[4], 0.5))
    served = PaddedGenerate(tmp_path, 2).run(requests)
    assert [request.tokens for request in served] == lengths
    assert all(r.arrival_s < r.first_token_s <= r.last_token_s for r in served)
    # Both of a batch get their first token in the same step, and the next batch begins when the longest has ended.
    assert served[0].first_token_s == served[1].first_token_s
    assert served[0].last_token_s < served[1].last_token_s < served[2].first_token_s == served[3].first_token_s
    assert served[4].first_token_s >= 0.5
