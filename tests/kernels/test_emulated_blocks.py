"""The source of the kernel that moves KV blocks, emulated on a CPU, against indexing."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch

from runner_svc.cuda.tiers import block_launches
from runner_svc.cuda.tiers.block_launches import CudaBlockCopies
from tests.support.block_moves import MOVES, MoveCase, check_moves
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule
from tests.support.host_blocks import HostBlockCopies
from tests.support.thoroughness import choice

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

CPU = torch.device("cpu")


def nothing() -> None:
    """Waits for nothing: a launch is done when it returns."""


@pytest.mark.parametrize(("grid", "threads", "unroll"), [(2, 64, 4), (3, 32, 1)])
@pytest.mark.parametrize("case", choice(MOVES[:5], in_ci=MOVES[:4]), ids=str)
def test_the_kernel_moves_blocks(
    case: MoveCase, grid: int, threads: int, unroll: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_launches, "Kernel", EmulatedKernel)
    monkeypatch.setattr(block_launches, "load", partial(EmulatedModule, arch="sm_80"))
    copies = CudaBlockCopies(grid=grid, threads=threads, unroll=unroll)
    check_moves(copies, case, CPU, torch.zeros(case.count, dtype=torch.int32), 0, nothing)


@pytest.mark.parametrize("case", MOVES, ids=str)
def test_its_twin_does(case: MoveCase) -> None:
    check_moves(HostBlockCopies(), case, CPU, torch.zeros(case.count, dtype=torch.int32), 0, nothing)
