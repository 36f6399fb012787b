"""One rank of a divided model in a process of its own: forms a group over gloo, and writes its greedy tokens as JSON.

python -m tests.support.rank_process RANK SIZE STORE MODEL REQUEST, where REQUEST is JSON: see `Request`. The tokens are
in STORE/rank-RANK.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.support import fork_server


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
    asked = [str(store), str(folder), json.dumps(asdict(request))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        fork_server.start(
            "tests.support.rank_process",
            [str(rank), str(size), *asked],
            environment,
            store / f"log-{rank}",
            kind=fork_server.Kind.TORCH,
        )
        for rank in range(size)
    ]
    try:
        ends = [rank.wait(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
    for rank, status in enumerate(ends):
        assert status == 0, (store / f"log-{rank}").read_text()[-3000:]
    return [json.loads((store / f"rank-{rank}").read_text()) for rank in range(size)]


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
    tokens = driver.generate(request.prompts, request.max_tokens, request.max_chunk)
    (store / f"rank-{rank}").write_text(json.dumps(tokens))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Request(**json.loads(sys.argv[5])))
