"""The host pool that the setting asks for: its size, its room, its measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roster_common.setting_sources import UnusableSettings
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.backends.null_backend import NullBackend
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.cuda.tiers.block_copier import BlockCopier
from runner_svc.interface.backend import Backend
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup import host_pool
from runner_svc.startup.host_pool import build_copier, free_memory
from runner_svc.startup.start_times import StartTimes
from runner_svc.tiers.kv_copier import Direction, KVCopier, Tickets
from runner_svc.tiers.thread_copier import ThreadCopier
from tests.support.host_backend import host_backend, no_progress
from tests.support.tiny_models import make_tiny_model


def built(backend: Backend, **given: Any) -> KVCopier | None:
    return build_copier(RunnerSettings(**given), backend, StartTimes())


def torch_backend(folder: Path) -> TorchBackend:
    return TorchBackend.load(
        str(folder),
        cache_folder=folder / "unused",
        progress=no_progress,
        num_blocks=30,
        block_size=16,
        num_slots=2,
        max_step_tokens=32,
    )


def test_there_is_none_by_default() -> None:
    assert built(HashBackend()) is None


@pytest.mark.parametrize(("tokens", "blocks"), [(16, 1), (31, 1), (32, 2), (1600, 100)])
def test_it_has_as_many_whole_blocks_as_tokens_fill(tokens: int, blocks: int) -> None:
    copier = built(HashBackend(), host_kv_tokens=tokens)
    assert copier is not None and copier.num_host_blocks == blocks
    assert copier.block_ns == {Direction.OFFLOAD: 0, Direction.LOAD: 0}  # a test backend's are not measured


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(UnusableSettings, match="host_kv_tokens is 15, less than one block: set it to at least 16"):
        built(HashBackend(), host_kv_tokens=15)


def test_more_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "free_memory", lambda: 100 * 16 * 8)
    assert built(HashBackend(), host_kv_tokens=1600) is not None
    with pytest.raises(UnusableSettings, match=r"host_kv_tokens asks for .* of the machine's memory, but"):
        built(HashBackend(), host_kv_tokens=1616)
    assert built(NullBackend(), host_kv_tokens=10**9) is not None  # nothing is stored


def test_free_memory_is_the_least_of_the_machine_and_the_cgroup(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert free_memory(meminfo, cgroup) is None
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:       7 kB\n")
    assert free_memory(meminfo, cgroup) == 7 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    assert free_memory(meminfo, cgroup) == 7 * 1024
    (cgroup / "memory.max").write_text("5000\n")
    (cgroup / "memory.current").write_text("4000\n")
    assert free_memory(meminfo, cgroup) == 1000
    (cgroup / "memory.current").write_text("6000\n")
    assert free_memory(meminfo, cgroup) == 0


def test_troubles_of_tests_are_passed_on() -> None:
    copier = built(HashBackend(), host_kv_tokens=64, test_backend={"copy_lost": 1.0, "copy_seed": 3})
    assert isinstance(copier, ThreadCopier)
    block = np.ones(1, np.int32)
    copier.start(Tickets(block, block, block), Tickets.none())
    copier.finish()
    assert [ticket.is_lost for ticket in copier.take_done()] == [True]


def test_a_models_blocks_are_measured(tmp_path: Path) -> None:
    backend = torch_backend(make_tiny_model("llama", tmp_path / "tiny"))
    copier = built(backend, host_kv_tokens=320)
    assert isinstance(copier, ThreadCopier)
    data = backend.cache.data
    assert copier.block_bytes == data.numel() * 4 // 31
    assert min(copier.block_ns.values()) > 0
    block = np.ones(1, np.int32)
    copier.start(Tickets(block, block, block), Tickets.none())
    copier.finish()
    assert [ticket.ordinal for ticket in copier.take_done()] == [1]  # the measurement's are forgotten
    backend.cache.data[:, :, 2] = 0.5
    copier.start(Tickets(2 * block, 7 * block, block), Tickets.none())
    copier.finish()
    copier.start(Tickets.none(), Tickets(7 * block, 9 * block, block))
    copier.finish()
    assert (data[:, :, 9] == 0.5).all()


def test_a_gpus_pool_is_page_locked_or_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    backend = host_backend(folder, num_slots=2, block_size=16, max_step_tokens=32, num_blocks=30)
    assert isinstance(built(backend, host_kv_tokens=320), BlockCopier)

    def refuse(memory: object) -> None:
        raise RuntimeError("page-locking 3 MiB failed: CUDA error\nmore")

    monkeypatch.setattr(backend._device, "lock", refuse)
    with pytest.raises(UnusableSettings, match=r"can't be made \(page-locking 3 MiB failed: CUDA error\): lower"):
        built(backend, host_kv_tokens=320)
