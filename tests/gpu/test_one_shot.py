"""Kernels of ranks: exchanges of two processes over shared GPU memory, and embeddings of a part of the vocabulary."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.ranks.embed_part import EmbedPart
from tests.support.gpu_ranks import GpuRanks


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[GpuRanks]:
    both = GpuRanks(2, tmp_path)
    both.all("form", epoch=1)
    yield both
    both.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "count", "begin"), [(8, 3, 0), (520, 33, 7), (4096, 100, 100)])
def test_embeddings_are_those_of_the_part_and_zeros(dtype: torch.dtype, width: int, count: int, begin: int) -> None:
    embeddings = torch.randn(count, width, device="cuda").to(dtype)
    tokens = torch.arange(begin + count + 9, dtype=torch.int32, device="cuda").flip(0).contiguous()
    out = torch.full((len(tokens), width), torch.nan, dtype=dtype, device="cuda")
    EmbedPart(width, dtype)(torch.cuda.current_stream().cuda_stream, tokens, embeddings, begin, out)
    expected = torch.zeros_like(out)
    for row, token in enumerate(tokens.tolist()):
        if begin <= token < begin + count:
            expected[row] = embeddings[token - begin]
    assert torch.equal(out, expected)


def test_ranks_exchange_over_shared_memory_and_in_replayed_graphs(
    ranks: GpuRanks,
) -> None:
    print(f"seed {(seed := random.randrange(2**31))}")
    answers = ranks.all("exchange", seed=seed, replays=12)
    print(f"an exchange between two contexts of one GPU: {answers[0]['milliseconds']:.2f} ms")
    assert [answer["compared"] for answer in answers] == [18 + 60] * 2


def test_a_launch_that_waits_ends_when_it_is_told_to(ranks: GpuRanks) -> None:
    ranks.ask(1, "spin")
    ranks.ask(0, "spin")
    ranks.answer(1)
    time.sleep(0.5)
    ranks.kill(1)
    ranks.give_up(1, "rank 1 was killed")
    began_at = time.monotonic()
    ranks.answer(0, 10.0)
    print(f"it ended {time.monotonic() - began_at:.3f} s after it was told")
    assert time.monotonic() - began_at < 1.0
