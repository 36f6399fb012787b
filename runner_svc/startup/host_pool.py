"""Makes the host pool that the setting `host_kv_tokens` asks for, and measures how long a block takes to copy."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import structlog

from roster_common.setting_sources import UnusableSettings
from runner_svc.interface.backend import Backend
from runner_svc.settings.backend_for_tests import BackendForTests
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.loading_progress import LoadingProgress
from runner_svc.startup.start_times import StartTimes
from runner_svc.tiers.block_copies import DeviceCache
from runner_svc.tiers.kv_copier import Direction, KVCopier, Tickets
from runner_svc.tiers.thread_copier import CopyTrouble, HostCache, ThreadCopier

_MEASURED_BLOCKS = 256
"""Most blocks that a measurement copies."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

log = structlog.get_logger()


def build_copier(settings: RunnerSettings, backend: Backend, times: StartTimes) -> KVCopier | None:
    """Returns the copier between the backend's cache and a host pool; None for `host_kv_tokens` 0.

    Raises UnusableSettings if the pool has no room.
    """
    if not settings.host_kv_tokens:
        return None
    num_host_blocks = settings.host_kv_tokens // settings.block_size
    if not num_host_blocks:
        raise UnusableSettings(
            f"host_kv_tokens is {settings.host_kv_tokens}, less than one block: set it to at least "
            f"{settings.block_size}, or to 0 for no host pool"
        )
    times.begin("making the host pool")
    began_at = time.monotonic()
    copier = _copier(backend, num_host_blocks, settings.test_backend)
    if copier.block_bytes and backend.device not in ("hash", "null"):
        copier.block_ns = measured(copier, backend.num_blocks)
    log.info(
        "made the host pool",
        blocks=num_host_blocks,
        mib=num_host_blocks * copier.block_bytes >> 20,
        load_us=round(copier.block_ns[Direction.LOAD] / 1000, 1),
        offload_us=round(copier.block_ns[Direction.OFFLOAD] / 1000, 1),
        seconds=round(time.monotonic() - began_at, 2),
    )
    return copier


def _copier(backend: Backend, num_host_blocks: int, given: BackendForTests) -> KVCopier:
    if isinstance(backend, DeviceCache):
        require_room(num_host_blocks, sum(region.block_bytes for region in backend.cache_regions))
        try:
            with LoadingProgress() as progress:
                return backend.host_copier(num_host_blocks, progress)
        except RuntimeError as error:  # of torch, which has one of its own for a full GPU
            reason = str(error).strip().splitlines()[0]
            raise UnusableSettings(
                f"the host pool can't be made ({reason}): lower host_kv_tokens, or gpu_memory if the GPU is full"
            ) from error
    assert isinstance(backend, HostCache), "every other backend has its cache here"
    trouble = CopyTrouble(given.copy_delay_ms / 1000, given.copy_lost, given.copy_seed)
    regions = backend.cache_regions
    require_room(num_host_blocks, sum(len(region) * region.shape[2] for region in regions))
    return ThreadCopier(regions, num_host_blocks, trouble)


def require_room(num_host_blocks: int, block_bytes: int) -> None:
    """Raises UnusableSettings if the machine's free memory does not hold the pool."""
    free, needed = free_memory(), num_host_blocks * block_bytes
    if free is not None and needed > free:
        raise UnusableSettings(
            f"host_kv_tokens asks for {needed / 2**30:.1f} GiB of the machine's memory, but {free / 2**30:.1f} GiB are "
            "free: lower it, or give this machine or container more memory"
        )


def free_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Returns the bytes that this process may still take, of the machine's and of its cgroup's; None if not known."""
    found = []
    try:
        lines = meminfo.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            found.append(max(0, int(limit) - int((cgroup / "memory.current").read_text())))
    except OSError:
        pass
    return min(found, default=None)


def measured(copier: KVCopier, num_blocks: int) -> dict[Direction, int]:
    """Returns the nanoseconds that a block takes in each direction: the second of two tickets, as memory is touched."""
    count = min(_MEASURED_BLOCKS, copier.num_host_blocks, num_blocks)
    blocks = np.arange(1, count + 1, dtype=np.int32)
    ticket, none = Tickets(blocks, blocks, np.array([count], np.int32)), Tickets.none()
    times: dict[Direction, int] = {}
    for _ in range(2):
        for offloads, loads in ((ticket, none), (none, ticket)):
            copier.start(offloads, loads)
            copier.finish()
            times.update({done.direction: done.us * 1000 // count for done in copier.take_done()})
    copier.restart()
    return times
