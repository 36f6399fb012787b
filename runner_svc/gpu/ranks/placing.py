"""The GPU of each rank, and what the ranks exchange over."""

from __future__ import annotations

import os
from functools import partial

import torch

from roster_common.setting_sources import UnusableSettings
from runner_svc.cuda.device import GpuDevice
from runner_svc.cuda.memory.shared_memory import SharedMemory
from runner_svc.cuda.ranks.peer_ranks import PeerRanks
from runner_svc.interface.device import Device
from runner_svc.interface.ranks import Communicator, Shard

LIMIT_S = 60.0
"""Longest wait for another rank on the device. The group finds a lost one much earlier."""
SHARING = "ROSTER_TEST_RANKS_SHARE_A_GPU"
"""Set by tests: ranks may share a GPU, with all_reduce one-shot."""


def gpu_of(shard: Shard) -> GpuDevice:
    """Returns the rank's GPU, the first that it sees. Raises UnusableSettings for fewer GPUs than ranks."""
    count = torch.cuda.device_count()
    if shard.size > count and not os.environ.get(SHARING):
        raise UnusableSettings(
            f"tensor_parallel is {shard.size}, but this host has {count} GPU{'s' * (count != 1)}: set tensor_parallel "
            f"to {count} or less"
        )
    # Threads besides this one call the driver while steps are captured: NCCL's watchdog.
    return GpuDevice(capture_mode="thread_local" if shard.size > 1 else "global")


def over_peer_memory(ranks: Communicator, device: Device, dtype: torch.dtype) -> PeerRanks:
    """Returns what exchanges GPU tensors over memory that the ranks of this host share, with its kernels compiled."""
    import_memory = partial(SharedMemory.imported, device=device.device.index or 0)
    peers = PeerRanks(ranks, device, import_memory, limit_s=LIMIT_S)
    peers.compile(dtype)
    return peers
