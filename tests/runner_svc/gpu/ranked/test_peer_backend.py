"""A rank's GPU backend that exchanges over shared memory, on the CPU: processes, with exchange kernels emulated."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runner_svc.cuda.ranks import one_shot
from runner_svc.cuda.ranks.exchange_state import ExchangeState
from runner_svc.cuda.ranks.one_shot import OneShot
from runner_svc.cuda.ranks.peer_ranks import PeerRanks
from runner_svc.gpu.ranked.backend import RankedCudaBackend
from runner_svc.group.forming import Group, store_in
from runner_svc.interface.ranks import Shard
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule
from tests.support.forked_ranks import forked
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import host_backend
from tests.support.host_device import HostDevice
from tests.support.memory_file import MemoryFile
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

SIZES = {"num_slots": 4, "block_size": 8, "max_step_tokens": 24, "num_blocks": 40}
ONE_SHOT = partial(OneShot, threads=32, most_blocks=2)


def test_graphs_stay_when_the_group_forms_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "Kernel", EmulatedKernel)
    monkeypatch.setattr(one_shot, "load", partial(EmulatedModule, arch="sm_90a"))
    torch.set_num_threads(1)
    print(f"seed {(seed := random.randrange(2**32))}")
    rng, folder = random.Random(seed), make_tiny_model("llama", tmp_path / "tiny")
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 12))] for _ in range(3)]
    alone = host_backend(folder, **SIZES)
    expected = RandomDriver(alone, random.Random(seed)).generate(prompts, 4, 12)
    exchange = ONE_SHOT(Shard(0, 2), ExchangeState(HostDevice(), 20.0), 1 << 16)
    for key in (("reduce", "float"), ("gather", 4)):
        kernel: Any = exchange._kernel(*key)
        assert kernel._module.library  # compiled once, before ranks fork

    def run(shard: Shard) -> None:
        group, device = Group(shard, store_in(tmp_path, 2)), HostDevice()
        memory = {"half_bytes": 1 << 16, "limit_s": 20.0, "is_capturing": lambda: False, "one_shot": ONE_SHOT}
        ranks = PeerRanks(group, device, MemoryFile.imported, **memory)
        backend = host_backend(folder, device=device, ranks=ranks, **SIZES)
        assert isinstance(backend, RankedCudaBackend)
        for epoch in (1, 2):
            group.form(epoch)
            graphs = backend.decode_graphs
            backend.regroup()
            assert (backend.decode_graphs is graphs) == (epoch == 2)
            assert RandomDriver(backend, random.Random(seed)).generate(prompts, 4, 12) == expected
        ranks.least(0)
        ranks.close()

    forked(2, run)
