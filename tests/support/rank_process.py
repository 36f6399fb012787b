"""One rank of a divided model in a process of its own: forms a group over gloo, and prints its greedy tokens as JSON.

python -m tests.support.rank_process RANK SIZE STORE MODEL REQUEST, where REQUEST is JSON: see `Request`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Request:
    """What all ranks are asked."""

    prompts: list[list[int]]
    max_tokens: int
    max_chunk: int
    seed: int
    deterministic: bool = False


def tokens_of_ranks(folder: Path, size: int, store: Path, request: Request) -> list[list[list[int]]]:
    """Returns what each of `size` processes got for each prompt. Fails with a rank's last words if it fails."""
    store.mkdir()
    command = [sys.executable, "-m", "tests.support.rank_process"]
    asked = [str(store), str(folder), json.dumps(asdict(request))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), *asked],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    try:
        ends = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, ends, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in ends]


def main(rank: int, size: int, store: Path, model: str, request: Request) -> None:
    from runner_svc.backends.torch_backend import TorchBackend
    from runner_svc.group.forming import Group, store_in
    from runner_svc.interface.ranks import Shard
    from tests.support.greedy_driver import RandomDriver

    torch.set_num_threads(1)
    group = Group(Shard(rank, size), store_in(store, size))
    backend = TorchBackend.load(
        model,
        cache_folder=store / "unused",
        progress=lambda what, share: None,
        num_blocks=64,
        block_size=16,
        num_slots=8,
        max_step_tokens=256,
        ranks=group,
        deterministic=request.deterministic,
    )
    group.form()
    backend.cache.data.fill_(torch.nan)
    driver = RandomDriver(backend, random.Random(request.seed))
    print(json.dumps(driver.generate(request.prompts, request.max_tokens, request.max_chunk)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Request(**json.loads(sys.argv[5])))
