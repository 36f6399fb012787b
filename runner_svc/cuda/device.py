"""GPU services for a backend besides kernels: a stream, pinned memory, events, graphs, and memory sizes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from runner_svc.cuda.memory.shared_memory import SharedMemory
from runner_svc.interface.pool_size import MemoryProfile

# While the host launches a step kernel by kernel, it can't send the previous step's result, for which a client waits.
# This is tolerated for up to this share of the step's own time.
_HOST_SHARE = 0.1
# Memory that captures leave free.
_LEFT_BYTES = 256 << 20


class GpuSideStream:
    """Implements `runner_svc.interface.device.SideStream`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.handle: int = self._stream.cuda_stream

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)


class GpuDevice:
    """One GPU and the stream that all steps are launched on."""

    def __init__(self, index: int = 0, capture_mode: str = "global") -> None:
        """`capture_mode`: torch's; "thread_local" where other threads call the driver while this one captures."""
        self._capture_mode = capture_mode
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._stream = torch.cuda.Stream(self.device)
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._taken = 0  # bytes, by the last capture

    @property
    def memory(self) -> int:
        """Bytes of the GPU, whatever is in use."""
        return torch.cuda.mem_get_info(self.device)[1]

    @contextmanager
    def stream(self) -> Iterator[int]:
        """Makes the stream the current one of this thread; yields its handle."""
        with torch.cuda.stream(self._stream):
            yield self._stream.cuda_stream

    def current_stream(self) -> int:
        """Returns the handle of the thread's current stream, which during a capture is the capturing one."""
        return torch.cuda.current_stream().cuda_stream

    def synchronize(self) -> None:
        """Waits for all launched work."""
        torch.cuda.synchronize(self.device)

    def pinned(self, words: int) -> Tensor:
        """Returns page-locked, zeroed int32 [words] on the host."""
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        """Returns an event recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def side_stream(self) -> GpuSideStream:
        """Returns another stream, of the same priority."""
        return GpuSideStream(self.device)

    def share(self, num_bytes: int) -> SharedMemory:
        """Allocates at least `num_bytes` that other processes can map. Raises SharedMemoryError."""
        return SharedMemory.create(num_bytes, self.device.index)

    def lock(self, memory: Tensor) -> None:
        """Page-locks a tensor of the host, which is much faster than allocating it so.

        It must be unlocked before it is freed: the driver refuses to lock memory again that was freed locked. Raises
        RuntimeError if the driver refuses.
        """
        size = memory.numel() * memory.element_size()
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        if code:
            raise RuntimeError(f"page-locking {size >> 20} MiB failed: {torch.cuda.CudaError(code)}")

    def unlock(self, memory: Tensor) -> None:
        """Undoes `lock`, once no copy of the memory is in flight."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Captures what `function` launches in a CUDA graph; returns its replay.

        `function` runs once before the capture, so that libraries are loaded.
        """
        function()
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        free, _ = torch.cuda.mem_get_info(self.device)
        # Not `torch.cuda.graph`, which frees all cached memory before each capture.
        with _without_collection(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._graph_pool, capture_error_mode=self._capture_mode)
            try:
                function()
            finally:
                graph.capture_end()
        self._taken = free - torch.cuda.mem_get_info(self.device)[0]
        return graph.replay

    def drop_graphs(self) -> None:
        """Frees the memory of earlier captures, whose replays are gone; later ones share other memory.

        torch takes no more captures into a pool whose last one is gone.
        """
        self.synchronize()
        torch.cuda.empty_cache()
        self._graph_pool = torch.cuda.graph_pool_handle()

    def seconds(self, replay: Callable[[], None], repeats: int = 5) -> float:
        """Returns the mean time of one replay, in seconds."""
        replay()
        begin = self.event()
        for _ in range(repeats):
            replay()
        end = self.event()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / repeats

    def has_room(self) -> bool:
        """Returns whether there is memory for another capture like the last."""
        return torch.cuda.mem_get_info(self.device)[0] >= 2 * self._taken + _LEFT_BYTES

    def is_late(self, launch: Callable[[], None], replay: Callable[[], None]) -> bool:
        """Returns whether the host's launch takes more than its tolerated share of the GPU's time for a replay."""
        self.synchronize()
        begin = time.perf_counter()
        launch()
        launching = time.perf_counter() - begin
        return launching > _HOST_SHARE * self.seconds(replay, repeats=1)

    def profile(self, largest_step: Callable[[], None]) -> MemoryProfile:
        """Runs the largest step and measures its memory use."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        largest_step()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated()
        free, total = torch.cuda.mem_get_info()
        other = total - free - torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        return MemoryProfile(total=total, peak=peak, other=other)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disables garbage collection: freeing GPU memory of an earlier backend would invalidate a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
