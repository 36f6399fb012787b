"""GPU memory shared by two processes: mapped bytes are the other's, a source killed in mid-copy leaves right data, and
blocks move between caches of two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from runner_svc.tiers.block_copies import Region
from runner_svc.transfer.grants import Grants
from runner_svc.transfer.memory_frames import Layout
from runner_svc.transfer.memory_reader import MemoryReader
from runner_svc.transfer.memory_server import MemoryServer
from runner_svc.transfer.transport import PullOrder, Unreachable

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.device import GpuDevice
from runner_svc.cuda.memory.shared_memory import SharedMemory, SharedMemoryError
from runner_svc.cuda.tiers.block_launches import CudaBlockCopies  # imports CuPy
from runner_svc.gpu.blocks import device_blocks
from runner_svc.gpu.blocks.device_blocks import DeviceBlocks

KEY = b"the key of a test"[:16]
PARTS, PIECE, NUM_BLOCKS = 64, 8192, 500
BLOCKS = np.arange(1, NUM_BLOCKS + 1, dtype=np.int32)


def never() -> bool:
    return False


def expected(num_blocks: int) -> torch.Tensor:
    """Returns the source's cache, uint8 [parts, blocks + 1, piece], on the host."""
    generator = torch.Generator().manual_seed(num_blocks)
    return torch.randint(0, 256, (PARTS, num_blocks + 1, PIECE), dtype=torch.uint8, generator=generator)


def cache_of(num_blocks: int, memory: torch.Tensor | None = None) -> torch.Tensor:
    values = expected(num_blocks).cuda()
    if memory is None:
        return values
    memory[: values.numel()] = values.view(-1)
    return memory[: values.numel()].view(values.shape)


def order(name: str, sources: np.ndarray, targets: np.ndarray) -> PullOrder:
    return PullOrder(KEY, "", b"", name, sources, targets)


def store_over(cache: torch.Tensor) -> DeviceBlocks:
    region = Region.of(cache, cache.shape[1])
    return DeviceBlocks(GpuDevice(), CudaBlockCopies, [region], lambda blocks: None)


def serve() -> None:
    """The source: offers its cache, says so, and waits for its end."""
    memory = SharedMemory.create(PARTS * (NUM_BLOCKS + 1) * PIECE)
    cache = cache_of(NUM_BLOCKS, memory.tensor)
    torch.cuda.synchronize()
    grants = Grants(NUM_BLOCKS)
    grants.add(KEY, BLOCKS, "")
    layout = Layout.of(memory.size, memory.address, [Region.of(cache, NUM_BLOCKS + 1)])
    print(MemoryServer(layout, grants, memory.descriptor).name, flush=True)
    time.sleep(100)


def source_process() -> tuple[subprocess.Popen[str], str]:
    code = "from tests.gpu.test_shared_memory import serve; serve()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    source = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert source.stdout is not None
    return source, source.stdout.readline().strip()


def test_memory_is_mapped_twice_and_freed() -> None:
    torch.cuda.init()
    size = 1 << 30
    with SharedMemory.create(size - 5) as memory:
        assert memory.size >= size - 5 and memory.size % (2 << 20) == 0
        tensor = memory.tensor
        assert tensor.data_ptr() == memory.address and tensor.dtype == torch.uint8 and len(tensor) == memory.size
        descriptor = memory.descriptor()
        began_at = time.perf_counter()
        again = SharedMemory.imported(descriptor, memory.size)
        print(f"import and map {memory.size >> 20} MiB: {(time.perf_counter() - began_at) * 1e3:.2f} ms")
        os.close(descriptor)
        tensor.fill_(3)
        again.tensor[7] = 9
        torch.cuda.synchronize()
        assert tensor[7].item() == 9 and again.tensor[8].item() == 3
        again.close()
    for _ in range(torch.cuda.mem_get_info()[1] // size + 10):  # more than the card has: each is freed again
        with SharedMemory.create(size):
            pass
    with pytest.raises(SharedMemoryError, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        SharedMemory.create(1 << 40)


def test_blocks_move_between_processes_and_a_killed_source_leaves_right_data(monkeypatch: pytest.MonkeyPatch) -> None:
    source, name = source_process()
    try:
        ours = torch.zeros(PARTS, 701, PIECE, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        targets = np.arange(700, 700 - NUM_BLOCKS, -1, dtype=np.int32)
        reader = MemoryReader(store_over(ours), SharedMemory.imported)
        values = expected(NUM_BLOCKS)
        for _ in range(2):
            began_at = time.perf_counter()
            num_bytes = reader.pull(order(name, BLOCKS, targets), never)
            seconds = time.perf_counter() - began_at
            print(f"{num_bytes >> 20} MiB in {seconds * 1e3:.2f} ms, {num_bytes / seconds / 1e9:.0f} GB/s")
            assert torch.equal(ours.cpu()[:, targets.astype(np.int64)], values[:, 1:])
            assert not ours.cpu()[:, : 701 - NUM_BLOCKS].any()
            ours.zero_()
            torch.cuda.synchronize()
        monkeypatch.setattr(device_blocks, "STAGING_BYTES", 4 * PARTS * PIECE)
        slow = MemoryReader(store_over(ours), SharedMemory.imported)
        asked = 0

        def kill_in_the_middle() -> bool:
            nonlocal asked
            asked += 1
            if asked == 60:
                source.send_signal(signal.SIGKILL)
                source.wait()
                time.sleep(0.3)  # the driver cleans up
                junk = torch.full((1 << 30,), 255, dtype=torch.uint8, device="cuda")  # would reuse freed memory
                del junk
            return False

        assert slow.pull(order(name, BLOCKS, targets), kill_in_the_middle) and asked == 125
        assert torch.equal(ours.cpu()[:, targets.astype(np.int64)], values[:, 1:])
        deadline = time.monotonic() + 10
        while (reader.num_mapped or slow.num_mapped) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not reader.num_mapped and not slow.num_mapped
        with pytest.raises(Unreachable):
            reader.pull(order(name, BLOCKS, targets), never)
    finally:
        source.kill()
        source.wait()


def test_bytes_of_blocks_go_out_and_in() -> None:
    here, there = cache_of(300), torch.zeros(PARTS, 401, PIECE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    blocks = np.random.default_rng(0).permutation(np.arange(1, 301, dtype=np.int32))[:257]
    began_at = time.perf_counter()
    data = store_over(here).read(blocks)
    read_at = time.perf_counter()
    targets = blocks + 100
    store_over(there).write(targets, data)
    print(f"read {len(data) / (read_at - began_at) / 1e9:.1f} GB/s")
    index = torch.from_numpy(blocks.astype(np.int64))
    assert torch.equal(there.cpu()[:, index + 100], here.cpu()[:, index])
    others = torch.ones(401, dtype=torch.bool)
    others[index + 100] = False
    assert not there.cpu()[:, others].any()
