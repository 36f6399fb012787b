"""A group over NCCL: exchanges, also in a captured graph, an end by another thread, and forming again.

One GPU has one rank of a group, as NCCL refuses two on one card; with several GPUs all of them take part.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from runner_svc.group.forming import Group, store_in
from runner_svc.interface.ranks import RankLost, Shard
from tests.support.ranks import together

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SIZE = torch.cuda.device_count()


def test_ranks_exchange_end_and_form_again(tmp_path: Path) -> None:
    def run(shard: Shard) -> None:
        torch.cuda.set_device(shard.rank)
        group = Group(shard, store_in(tmp_path, SIZE), timeout_s=20)
        group.use(on_gpu=True)
        for epoch in (1, 2, 3):
            group.form(epoch)
            exchange(group)
            capture(group)
            ended = threading.Thread(target=group.abort)
            ended.start()
            ended.join()
            with pytest.raises(RankLost):
                group.all_reduce(torch.ones(4, device="cuda"))

    together(SIZE, run)


def exchange(group: Group) -> None:
    rank = group.shard.rank
    ones = torch.full((3, 5), float(rank + 1), device="cuda", dtype=torch.bfloat16)
    assert group.all_reduce(ones).tolist() == [[SIZE * (SIZE + 1) / 2] * 5] * 3
    gathered = group.all_gather(torch.full((2, 3), rank, device="cuda"))
    assert gathered.tolist() == [[each for each in range(SIZE) for _ in range(3)]] * 2
    assert group.broadcast(torch.tensor([7 - rank], device="cuda")).tolist() == [7]
    assert group.least(10 + rank) == 10


def capture(group: Group) -> None:
    """Replays a graph with a sum in it."""
    values = torch.zeros(8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        group.all_reduce(values)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        total = group.all_reduce(values)
    for value in (1.0, 3.0):
        values.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert total.tolist() == [value * SIZE] * 8
    del graph
